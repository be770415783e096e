"""Golden records of the small helpers, and of the lengths generator."""

import pytest
from records import array, every_record, expect_array, given


@every_record("exclusive_cumsum")
def test_exclusive_cumsum(face, record):
    tensor, dim = given(face, record["inputs"], "tensor", "dim")
    got = face.module.exclusive_cumsum(tensor, dim=dim)
    expect_array(face, "result", got, record["outputs"]["result"])
    if dim == 0:
        got = face.module.exclusive_cumsum(tensor)
        expect_array(face, "result", got, record["outputs"]["result"])


@every_record("prepend_zero_fn")
@pytest.mark.parametrize("name", ["prepend_zero", "prepend_zero_fn"])
def test_prepend_zero(face, record, name):
    tensor, dim = given(face, record["inputs"], "tensor", "dim")
    got = getattr(face.module, name)(tensor, dim)
    expect_array(face, "result", got, record["outputs"]["result"])


@every_record("mask_by_neg")
def test_mask_by_neg(face, record):
    got = face.module.mask_by_neg(*given(face, record["inputs"], "tensor", "mask"))
    expect_array(face, "result", got, record["outputs"]["result"])


@every_record("index_put_with_neg_padding_1d")
def test_index_put_with_neg_padding_1d(face, record):
    arguments = given(face, record["inputs"], "tensor", "src", "index")
    got = face.module.index_put_with_neg_padding_1d(*arguments)
    expect_array(face, "result", got, record["outputs"]["result"])
    expect_array(face, "the argument", arguments[0], record["inputs"]["tensor"])


@every_record("gen_seq_lens")
def test_gen_seq_lens(face, record):
    inputs = record["inputs"]
    arguments = given(face, inputs, "world_size", "num_seqs", "total_len")
    (uniforms,) = given(face, inputs, "uniforms")
    got = face.module.gen_seq_lens(*arguments, uniforms=uniforms)
    expect_array(face, "seq_len", got, record["outputs"]["seq_len"])


@every_record("gen_seq_lens")
def test_gen_seq_lens_draws_what_the_original_drew(record):
    torch = pytest.importorskip("torch")
    from faces import torch_face

    face, inputs = torch_face(), record["inputs"]
    world_size, num_seqs, total_len = given(face, inputs, "world_size", "num_seqs", "total_len")
    torch.manual_seed(record["seed"])
    drawn = torch.rand(world_size, num_seqs).numpy()
    assert (drawn == array(inputs["uniforms"])).all(), "torch's generator is another than then"
    torch.manual_seed(record["seed"])
    got = face.module.gen_seq_lens(world_size, num_seqs, total_len)
    expect_array(face, "seq_len", got, record["outputs"]["seq_len"])
