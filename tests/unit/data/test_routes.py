"""Routes as servers send them: what is taken, and what cannot be."""

import base64
import io

import numpy as np
import pytest

from torchtitan.grpo.data.routes import RouteShape, free, to_npy

SHAPE = RouteShape(layers=3, top_k=2, experts=8)


def drawn(shape: RouteShape, positions: int) -> np.ndarray:
    draw = np.random.default_rng(0)
    return draw.random((positions, shape.layers, shape.experts)).argsort(-1)[..., : shape.top_k]


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def saved(array: np.ndarray, **kwargs: object) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **kwargs)
    return file.getvalue()


@pytest.mark.parametrize(("experts", "kept"), [(8, np.uint8), (255, np.uint8), (256, np.int16), (512, np.int16)])
def test_every_integer_type_becomes_the_smallest_that_has_a_number_to_spare(experts, kept):
    shape = RouteShape(2, 4, experts)
    routes = drawn(shape, 5)
    sent = [np.uint8] if experts <= 256 else []
    for dtype in (*sent, np.uint16, np.int16, np.int32, np.int64):
        found = shape.from_npy(text(saved(routes.astype(dtype))), 5)
        assert found.dtype == kept and np.array_equal(found, routes)
        assert experts <= free(found.dtype)
    assert np.array_equal(shape.from_int32(text(routes.astype("<i4").tobytes()), 5), routes)
    kept_text = to_npy(shape.checked(routes, 5))
    whole = np.load(io.BytesIO(base64.b64decode(kept_text)))
    assert whole.dtype == kept and np.array_equal(whole, routes)


def test_no_positions_and_one_expert_of_one():
    assert SHAPE.from_npy(text(saved(np.zeros((0, 3, 2), np.uint8))), 0).shape == (0, 3, 2)
    assert RouteShape(3, 1, 1).from_npy(text(saved(np.zeros((4, 3, 1), np.uint8))), 4).max() == 0


GOOD = drawn(SHAPE, 4).astype(np.uint8)
HEADER = b"\x93NUMPY\x01\x00"


def header(content: bytes) -> bytes:
    return HEADER + len(content).to_bytes(2, "little") + content


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ("%%%", "base64"),
        (text(b"no array"), "no .npy file"),
        (text(HEADER), "no .npy file"),
        (text(saved(GOOD)[:40]), "no .npy file"),
        (text(saved(GOOD)[:-1]), "has 23 numbers and shape"),
        (text(saved(GOOD) + b"\0"), "has 25 numbers and shape"),
        (text(saved(GOOD.astype(np.float32))), "array of float32"),
        (text(saved(np.asfortranarray(GOOD))), "C order"),
        (text(saved(np.array([None]), allow_pickle=True)), "array of object"),
        (text(header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000, 3, 2)}")), "has 0 numbers"),
        (text(header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 3, 2)}")), "has 0 numbers"),
        (text(header(b"(" * 1000)), "no .npy file"),
        (text(header(b"__import__('os').abort()")), "no .npy file"),
        (text(saved(GOOD[:3])), r"shape \[3, 3, 2\], this model's 4 positions have \[4, 3, 2\]"),
        (text(saved(GOOD[:, :2])), r"shape \[4, 2, 2\]"),
        (text(saved(GOOD + 1)), "experts 1 to 8, the model has 0 to 7"),
        (text(saved(GOOD.astype(np.int16) - 1)), "experts -1 to 6"),
        (text(saved(np.zeros_like(GOOD))), "an expert twice at position 0: .*--moe-backend triton"),
    ],
)
def test_what_cannot_be_routes_is_refused(sent, said):
    with pytest.raises(ValueError, match=said):
        SHAPE.from_npy(sent, 4)


def test_numbers_without_a_shape_must_be_as_many_as_are_due():
    with pytest.raises(ValueError, match="has 23 numbers, 4 positions of 6 are due"):
        SHAPE.from_int32(text(GOOD.astype("<i4").tobytes()[:-4]), 4)
    with pytest.raises(ValueError, match="buffer size"):
        SHAPE.from_int32(text(GOOD.astype("<i4").tobytes()[:-1]), 4)
