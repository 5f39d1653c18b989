"""Averages in buckets: each element exactly once, whatever the sizes."""

import math

import pytest
import torch
from helpers import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_optim import tree
from functional_optim.replicas.coordinator import reduce_in_buckets

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.complex64)
SHAPES = ((), (0, 3), (1,), (5,), (3, 2), (2, 1, 4), (17,))


@st.composite
def leaves(draw):
    """None, or a tensor of small whole numbers, in one of several layouts."""
    if draw(st.integers(0, 7)) == 0:
        return None
    shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
    n = math.prod(shape)
    x = torch.arange(n, dtype=torch.float32).remainder(50).to(dtype).reshape(shape)
    layout = draw(st.sampled_from(("plain", "transposed", "part", "conjugate")))
    if layout == "transposed" and x.ndim:
        x = x.mT.contiguous().mT if x.ndim > 1 else x
    if layout == "part":  # of something larger, at an odd place
        x = torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(shape)
    if layout == "conjugate" and x.is_complex():
        x = (x + 1j).conj()
    return x


class Recorder:
    """A "mean" that adds 1 to each element, and notes what it was given."""

    def __init__(self):
        self.vectors = []

    def __call__(self, vector):
        self.vectors.append((vector.dtype, vector.numel()))
        return lambda: vector.add_(1)


def plus_one(x):
    return (
        torch.view_as_complex(torch.view_as_real(x.resolve_conj()) + 1) if x.is_complex() else x + 1
    )


@settings(max_examples=300)
@given(
    values=st.dictionaries(st.sampled_from("abcdefgh"), leaves(), max_size=8),
    cap=st.one_of(st.integers(1, 70), st.just(2**20)),
)
def test_every_element_is_reduced_exactly_once(values, cap):
    before = tree.map(torch.clone, values)
    mean = Recorder()
    made = reduce_in_buckets(values, mean, cap).wait()
    assert_same(made, tree.map(plus_one, before))
    assert_same(values, before)
    for (path, x), new in zip(tree.items(values), tree.leaves(made), strict=True):
        assert new.stride() == x.stride(), path
        assert new is not x
    for dtype, n in mean.vectors:
        assert n * dtype.itemsize <= cap or n == 1
    given = [
        torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in tree.leaves(values)
    ]
    for dtype in {x.dtype for x in given}:
        sent = [n for kind, n in mean.vectors if kind == dtype]
        assert sum(sent) == sum(x.numel() for x in given if x.dtype == dtype)
        assert len(sent) == math.ceil(sum(sent) / max(1, cap // dtype.itemsize))


def test_waiting_twice_gives_the_same_tree():
    reduction = reduce_in_buckets({"w": torch.ones(3)}, Recorder(), 8)
    assert reduction.wait() is reduction.wait()


@pytest.mark.parametrize("leaf", [torch.ones(2, dtype=torch.int64), "text"])
def test_what_has_no_mean_is_named(leaf):
    with pytest.raises(TypeError, match=r"'a\.0' is a"):
        reduce_in_buckets({"a": [leaf]}, Recorder(), 8)


def test_a_tensor_larger_than_a_bucket_is_reduced_here_and_not_by_torchft():
    """torchft's buckets leave out what does not fit into one, without a word."""
    values = [torch.zeros(2), torch.zeros(10), torch.zeros(3)]
    made = reduce_in_buckets(values, Recorder(), 16).wait()
    assert all(torch.equal(x, torch.ones_like(x)) for x in made)

    local_sgd = pytest.importorskip("torchft.local_sgd")

    class Manager:
        def allreduce(self, x, should_quantize):
            return Work(x.add_(1))

    class Work:
        def __init__(self, x):
            self.done = torch.futures.Future()
            self.done.set_result(x)

        def get_future(self):
            return self.done

    fragment = object.__new__(local_sgd._StreamingDiLoCoFragment)
    fragment._manager, fragment.should_quantize, fragment._allreduce_work = Manager(), False, []
    fragment._bucketize_and_allreduce(values, 16)
    assert [x.unique().tolist() for x in values] == [[1.0], [0.0], [0.0]]


def test_of_a_sharded_tensor_this_process_sends_its_part(mesh):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    whole = torch.arange(6.0).reshape(2, 3)
    values = {
        "columns": distribute_tensor(whole.t(), mesh, [Shard(0)]),
        "plain": torch.zeros(3),
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
    }
    mean = Recorder()
    made = reduce_in_buckets(values, mean, 20).wait()
    assert [n for _, n in mean.vectors] == [5, 5, 5]
    for name, x in values.items():
        assert type(made[name]) is type(x)
        assert made[name].stride() == x.stride()
    for name in ("columns", "rows"):
        assert isinstance(made[name], DTensor)
        assert made[name].placements == values[name].placements
        assert made[name].to_local().stride() == values[name].to_local().stride()
        assert torch.equal(made[name].full_tensor(), values[name].full_tensor() + 1)
