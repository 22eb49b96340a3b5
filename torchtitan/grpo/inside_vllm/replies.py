"""More fields in the choices of vLLM's token-in, token-out replies. In the API server's process only."""

import functools
import multiprocessing
import sys
from collections.abc import Mapping
from typing import Any

_API_SERVER = "vllm.entrypoints.openai.api_server"


def in_api_server() -> bool:
    """Whether this process is vLLM's API server, and not one of its children, which load the plug-in too."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    serves = _API_SERVER in sys.modules or (main is not None and main.name == _API_SERVER)
    return serves and multiprocessing.parent_process() is None


def with_field(reply: Any, key: str, values: Mapping[int, Any]) -> Any:
    """The reply, a pydantic model, with the field `key` in each choice: its value by the choice's index, or None.

    The choices' own class drops fields that it does not declare, and the route sends what `model_dump` returns.
    """
    more = getattr(reply, "_more_fields", {}) | {key: values}
    made = _extended(type(reply)).model_construct(**dict(reply))
    made._more_fields = more
    return made


class _MoreFields:
    """Mark of the classes that `_extended` makes."""


@functools.cache
def _extended(reply_class: type) -> type:
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
