"""A wait on a GPU missed its deadline and an operation of torch noticed: the error says which."""

import os
import subprocess
import sys
import textwrap

import pytest

import waybill
from waybill import _core, _graphs

TEXT = "dispatch: rank 0 waited for signal >= 3 from rank 1; last seen 2"
NOTE = f"waybill: cuda:0 was lost: {TEXT}"


def said(error):
    return [str(error), *getattr(error, "__notes__", ())]


@pytest.fixture(params=[1, 2])
def lost(monkeypatch, request):
    """The record of a lost device, on which there are so many ranks of this process."""
    fault = (0, 0, request.param, TEXT)  # rank, device, ranks on it, what its kernel says
    monkeypatch.setattr(_core, "device_faults", lambda: [fault])
    return request.param


def fail():
    raise RuntimeError("CUDA error: unspecified launch failure")


def test_an_installation_without_gpus_knows_nothing():
    if not waybill.num_gpus():
        assert _core.device_faults() == []


def test_what_ends_a_rank(lost):
    with pytest.raises(RuntimeError) as caught:
        waybill.run_threads(2, lambda world: world.rank == 0 and fail())
    text = "\n".join(said(caught.value))
    assert text.startswith("CUDA error: ") and text.count(NOTE) == 1, text
    assert text.count("torch.cuda.current_stream().synchronize()") == (lost > 1), text


def test_errors_of_waybill_say_it_themselves(lost):
    with pytest.raises(waybill.InvalidArgument) as caught:
        waybill.run_threads(1, lambda world: waybill.plan([4], 0, 0))
    assert NOTE not in "\n".join(said(caught.value))


def test_what_a_call_of_waybill_raises(lost):
    """A framework may catch it before it ends the rank."""
    call = waybill._graphs.outside_graphs(fail)
    with pytest.raises(RuntimeError) as caught:
        waybill._graphs.outside_graphs(call)()
    assert "\n".join(said(caught.value)).count(NOTE) == 1


def test_before_python_3_11(lost):
    class Old(RuntimeError):
        add_note = property()  # as if there were none

    error = Old("CUDA error")
    for _ in range(2):
        _graphs.explain(error)
    assert str(error).startswith(f"CUDA error\n{NOTE}") and str(error).count(NOTE) == 1


def test_what_ends_a_process(lost, monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.extend(said(error)))
    for _ in range(2):
        _graphs.explain_at_exit()
    error = RuntimeError("CUDA error")
    sys.excepthook(RuntimeError, error, None)
    assert shown[0].startswith("CUDA error") and "\n".join(shown).count(NOTE) == 1


def run(program, **variables):
    environment = {**os.environ, **{k: str(v) for k, v in variables.items()}}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


RANKS = """
    import sys, time
    import torch, waybill
    import waybill.torch as wt

    plan = waybill.QkvPlan(2, [0, 1, 2], [2, 2], [1, 0], [0, 1, 2], [0, 1])
    metadata = plan.to_metadata()

    def body(world):
        torch.cuda.set_device(world.device)
        rows = torch.ones(2, 512, device=world.device)
        dispatcher = wt.SequenceDispatcher(world)
        handle = dispatcher.plan_dispatch((metadata.fwd_kv, rows))
        dispatcher.dispatch(handle, rows)
        torch.cuda.current_stream().synchronize()
        world.barrier()
        if world.rank == 1:
            time.sleep(8)
            return
        dispatcher.dispatch(handle, rows)
        torch.cuda.current_stream().synchronize()
        rows.sum().item()
"""


@pytest.mark.skipif(waybill.num_gpus() != 1, reason="needs one GPU, for both ranks")
def test_threads_that_share_a_gpu():
    output = run(
        RANKS
        + """
    wt.run_threads(2, body, device="cuda", timeout_s=3)
    """
    ).communicate(timeout=120)[0]
    assert "waybill: cuda:0 was lost: dispatch: rank 0 waited for signal >= 2 from rank 1" in output
    assert "torch.cuda.current_stream().synchronize()" in output, output


@pytest.mark.skipif(waybill.num_gpus() < 2, reason="needs two GPUs, one for each process")
def test_processes(tmp_path):
    program = (
        RANKS
        + """
    body(waybill.World.from_environment(device="cuda", timeout_s=3))
    """
    )
    ranks = [
        run(program, RANK=rank, WORLD_SIZE=2, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=2,
            WAYBILL_RENDEZVOUS=f"file://{tmp_path}/meet")
        for rank in range(2)
    ]  # fmt: skip
    output = ranks[0].communicate(timeout=120)[0]
    ranks[1].communicate(timeout=120)
    assert "waybill: cuda:0 was lost: dispatch: rank 0 waited for signal >= 2 from rank 1" in output
    assert "RuntimeError" in output or "AcceleratorError" in output, output
