"""Which experts computed a token: the routing of a mixture of experts, for routing replay (R3, arXiv 2510.11370).

Routes are an array [positions, layers, top_k] of expert numbers. A server has computed every token of prompt and answer
but the last, so there is one position less than tokens. These are the positions of a packed document.
"""

import base64
import io
import itertools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RouteShape:
    """What routes of one model look like.

    Attributes:
        layers: Layers that have experts.
        top_k: Experts of a token.
        experts: Of a layer.
    """

    layers: int
    top_k: int
    experts: int

    @property
    def dtype(self) -> np.dtype:
        """uint8 for up to 255 experts, else int16. Its largest value is no expert, see `free`."""
        return np.dtype(np.uint8 if self.experts < 256 else np.int16)

    def from_npy(self, text: str, positions: int) -> np.ndarray:
        """Routes from a base64 .npy file, as vLLM and the embedded server send them.

        Raises:
            ValueError: They cannot be routes of that many positions of this model.
        """
        return self.checked(_read_npy(base64.b64decode(text, validate=True)), positions)

    def from_int32(self, text: str, positions: int) -> np.ndarray:
        """Routes from base64 int32 numbers without a shape, as SGLang sends them. Raises ValueError as `from_npy`."""
        values = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
        of_position = self.layers * self.top_k
        if values.size != positions * of_position:
            raise ValueError(
                f"routed_experts has {values.size} numbers, {positions} positions of {of_position} are due"
            )
        return self.checked(values.reshape(positions, self.layers, self.top_k), positions)

    def checked(self, routes: np.ndarray, positions: int) -> np.ndarray:
        """The routes in `dtype`.

        Raises:
            ValueError: Their shape is another, a number is no expert's, or a token has an expert twice. So it has if
                the server's kernel chose experts without telling: all numbers are 0 then.
        """
        if routes.shape != (positions, self.layers, self.top_k):
            raise ValueError(
                f"routed_experts has shape {list(routes.shape)}, this model's {positions} positions have "
                f"{[positions, self.layers, self.top_k]}"
            )
        if routes.size and not 0 <= int(routes.min()) <= int(routes.max()) < self.experts:
            raise ValueError(
                f"routed_experts has experts {int(routes.min())} to {int(routes.max())}, the model has 0 to "
                f"{self.experts - 1}"
            )
        routes = routes.astype(self.dtype)
        # Whole arrays are compared, which takes a tenth of a sort's time.
        chosen = np.ascontiguousarray(np.moveaxis(routes, -1, 0))
        twice: np.ndarray = np.zeros((positions, self.layers), bool)
        for i, j in itertools.combinations(range(self.top_k), 2):
            twice |= chosen[i] == chosen[j]
        if twice.any():
            position = int(twice.any(1).argmax())
            raise ValueError(
                f"routed_experts names an expert twice at position {position}: the server did not record "
                "what its kernel chose (vLLM: --moe-backend triton)"
            )
        return routes


def free(dtype: np.dtype | type) -> int:
    """The number that stands for no expert in routes of this dtype: the router chooses by itself there."""
    return int(np.iinfo(dtype).max)


def to_npy(routes: np.ndarray) -> str:
    """Integers as text: a base64 .npy file."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(routes), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")


def _read_npy(data: bytes) -> np.ndarray:
    """A .npy file of integers. numpy's `load` allocates whatever a header asks for, before it reads on."""
    file = io.BytesIO(data)
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("its version is not 1.0")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except Exception as error:  # what a server sent may make numpy's parser raise anything
        raise ValueError(f"routed_experts is no .npy file: {error}") from error
    if dtype.kind not in "iu" or is_fortran:
        raise ValueError(f"routed_experts is an array of {dtype}, not of integers in C order")
    values = np.frombuffer(data, dtype, offset=file.tell())
    if any(n < 0 for n in shape) or values.size != int(np.prod(shape, dtype=object)):
        raise ValueError(f"routed_experts has {values.size} numbers and shape {list(shape)[:8]}")
    return values.reshape(shape)
