"""Slices of flattened weights: every rank's part together is the whole, whatever the shape and the cut."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kl_comedy.models.slices import Layout, Slice, clean_name, held, is_slice, kept_buffers, local


def layout_of(shape, sizes, rank):
    return Layout(shape=torch.Size(shape), sizes=tuple(sizes), mesh=SimpleNamespace(get_local_rank=lambda: rank))


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3), ranks=st.integers(1, 5), data=st.data()
)  # fmt: skip
def test_parts_that_take_from_a_whole_are_the_whole(shape, ranks, data):
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, whole.numel()), min_size=ranks - 1, max_size=ranks - 1)))
    sizes = [end - start for start, end in zip([0, *cuts], [*cuts, whole.numel()], strict=True)]
    parts = []
    for rank, size in enumerate(sizes):
        part = Slice(local=torch.full((size,), -1.0, dtype=torch.float64), layout=layout_of(shape, sizes, rank))
        part.take(whole)
        assert part.numel() == whole.numel() and part.shape == whole.shape and part.dtype == whole.dtype
        parts.append(part.local)
    assert torch.equal(torch.cat(parts).view(shape), whole)


def test_what_is_not_cut_is_held_as_it_is():
    parameter = nn.Parameter(torch.ones(3, 2))
    assert held(parameter) is parameter and not is_slice(parameter)
    values = torch.zeros(3, 2)
    assert held(parameter, values) is values and local(values) is values


def test_names_and_buffers_are_those_of_a_state_dict():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].register_buffer("kept", torch.ones(1))
    model[1].register_buffer("lost", torch.ones(1), persistent=False)
    parameters = {name for name, _ in model.named_parameters()}
    assert [name for name, _ in kept_buffers(model)] == [n for n in model.state_dict() if n not in parameters]
    assert clean_name("_fsdp_wrapped_module.a._fsdp_wrapped_module.b") == "a.b"
