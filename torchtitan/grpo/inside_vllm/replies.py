"""Extra fields in the choices of vLLM's token-in, token-out replies."""

import functools
from collections.abc import Mapping
from typing import Any


def with_field(reply: Any, key: str, values: Mapping[int, Any]) -> Any:
    """The reply (a pydantic model) with a field `key` in each choice: the value at the choice's index, or None.

    The class of a choice drops fields that it does not declare. So the field is added to what `model_dump` returns,
    which is what the route sends.
    """
    more = getattr(reply, "_more_fields", {}) | {key: values}
    made = _extended(reply.__class__).model_construct(**dict(reply))
    made._more_fields = more
    return made


class _MoreFields:
    """Marks the classes that `_extended` makes."""


@functools.cache
def _extended(reply_class: Any) -> Any:
    if issubclass(reply_class, _MoreFields):
        return reply_class

    class Reply(reply_class, _MoreFields):
        _more_fields: dict[str, Mapping[int, Any]]

        def model_dump(self, **kwargs: Any) -> dict[str, Any]:
            dumped = super().model_dump(**kwargs)
            for choice in dumped["choices"]:
                choice |= {key: values.get(choice["index"]) for key, values in self._more_fields.items()}
            return dumped

    return Reply
