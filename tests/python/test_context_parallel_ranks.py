"""Chunks, prefixes and ranks that forward, on 1 to 8 ranks that are threads or processes."""

import pathlib

import pytest
from packed import close, leaves_of, module, pieces_in_order, pieces_zigzag, tensors_of, whole
from test_context_parallel_chunks import chunked
from test_context_parallel_prefix import dense
from test_process_worlds import expect_all_well, run_ranks

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")

LENGTHS, PREFIXES, CHUNK = [90, 7, 33, 1, 40], [20, 7, 0, 1, 41], 16
#: By name: options of the module.
KINDS = {
    "chunk": {"chunk": CHUNK},
    "prefix": {"mask": "prefix"},
    "relay": {"relay": "always"},
    "prefix, relay": {"mask": "prefix", "relay": "always"},
}


def case_of(kind, size):
    """Pieces as the module gets them, tensors, and what each rank must get."""
    pieces = (pieces_zigzag if size % 2 else pieces_in_order)(LENGTHS, size)
    tensors = tensors_of(pieces, 2, 1, 8, 8, size)
    if "prefix" in kind:
        held = [[(*piece, PREFIXES[piece[0]]) for piece in of] for of in pieces]
        return held, tensors, dense(held, tensors)
    return pieces, tensors, whole(chunked(pieces, CHUNK) if kind == "chunk" else pieces, tensors)


def step(world, kind, held, tensors):
    """Output and gradients of this rank, in place and with all rows through the window."""
    found = []
    for in_place in (True, False):
        attend = module(world, in_place=in_place, **KINDS[kind])
        q, k, v = leaves_of(tensors[world.rank])
        out = attend(attend.plan(attend.gather(held[world.rank])), q, k, v)
        (out * tensors[world.rank][3]).sum().backward()
        attend.close()
        found.append([out.detach(), q.grad, k.grad, v.grad])
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", range(1, 9))
def test_threads(kind, size):
    held, tensors, wanted = case_of(kind, size)
    found = wt.run_threads(size, lambda world: step(world, kind, held, tensors))
    for got, expected in zip(found, wanted):
        for one in got:
            close(one, expected[:4])


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_processes(tmp_path, size):
    program = """
    import sys

    sys.path.insert(0, "{tests}")
    from torch import distributed
    from test_context_parallel_ranks import KINDS, case_of, close, step
    from waybill.torch import World

    me, W = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group(
        "gloo", init_method="file://{folder}/group", rank=me, world_size=W
    )
    world = World.from_process_group(timeout_s=100)
    for kind in KINDS:
        held, tensors, wanted = case_of(kind, W)
        for one in step(world, kind, held, tensors):
            close(one, wanted[me][:4])
    distributed.destroy_process_group()
    print("rank", me, "of", W, "is well")
    """
    program = program.replace("{tests}", str(pathlib.Path(__file__).parent))
    program = program.replace("{folder}", str(tmp_path))
    expect_all_well(run_ranks(tmp_path, program, world_size=size))


@pytest.mark.parametrize("source", ["wlbllm", "prolong", "magi_default"])
@pytest.mark.parametrize("size", [2, 8, 64])
def test_plans_of_chunks_are_even(source, size):
    """Within a hundredth, of documents that are packed in order; those of prefixes: in C++."""
    for chunk in (2048, 8192):
        lengths = waybill.sample_documents(source, size * 16384, 1).tolist()
        plan = wt.BatchPlanner(size, 32, 8, 128, chunk=chunk).plan(pieces_in_order(lengths, size))
        assert plan.imbalance <= 1.01, (chunk, plan.imbalance)
