"""The backend for CollectiveX delivers and sums what its oracle asks for, with the oracle's facts
computed here; the oracle itself runs with bench/collectivex/run.py, from a checkout.
"""

import json
import pathlib
import textwrap

import pytest
from rank_processes import run_file, run_programs

pytest.importorskip("torch")

FOLDER = pathlib.Path(__file__).parents[2] / "bench" / "collectivex"
MODES = [(mode, precision) for mode in ("normal", "low-latency") for precision in ("bf16", "fp8")]

# A rank of two. CollectiveX's base class keeps the arguments; the backend needs no more of it.
RANK = """
import sys, types
import torch
from torch import distributed

rank, mode, precision, store = int(sys.argv[1]), *sys.argv[2:5]
sys.path.insert(0, sys.argv[5])

class EPBackend:
    def __init__(self, args, rank, world_size, local_rank, device):
        self.args, self.rank, self.world_size, self.device = args, rank, world_size, device
        self.mode, self.precision = args.mode, args.precision

    def finalize(self, rc):
        distributed.destroy_process_group()
        return rc

sys.modules["ep_backend"] = types.ModuleType("ep_backend")
sys.modules["ep_backend"].EPBackend = EPBackend
from ep_waybill import WaybillBackend

torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
args = types.SimpleNamespace(
    mode=mode, precision=precision, experts=8, hidden=256, topk=3, gpus_per_node=2
)
backend = WaybillBackend(args, rank, 2, rank, torch.device("cpu"))
TOKENS = 5
backend.create_buffer(types.SimpleNamespace(max_tokens_per_rank=7))

made = torch.Generator().manual_seed(1)
x = torch.randn(2 * TOKENS, 256, generator=made).bfloat16()
x[3] = 0  # float8 has no scale for it
ids = torch.rand(2 * TOKENS, 8, generator=made).topk(3).indices
ids[4] = torch.tensor([0, 1, 2])  # all to rank 0
weights = torch.rand(2 * TOKENS, 3, generator=made)
mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
problem = types.SimpleNamespace(
    dispatch_x=x[mine], topk_idx=ids[mine], topk_weights=weights[mine]
)
handle = backend.dispatch(problem)
view = backend.inspect_dispatch(problem, handle)
expected = backend.semantic_payload(x)
here = ids // 4 == rank
assert torch.equal(view.local_expert_counts, torch.bincount(ids[here] - 4 * rank, minlength=4))
if mode == "normal":  # by source rank, then token
    tokens = here.any(1).nonzero().squeeze(1)
    assert torch.equal(view.payload, expected[tokens])
    assert torch.equal(view.expert_ids, torch.where(here, ids, -1)[tokens])
    assert torch.equal(view.weights, weights.masked_fill(~here, 0)[tokens])
    rows = view.payload.float() * view.weights.sum(1, keepdim=True)
else:  # by expert, source rank, token
    slots = sorted((int(ids[t, k]), t) for t, k in here.nonzero().tolist())
    assert view.expert_ids.tolist() == [e for e, _ in slots]
    assert torch.equal(view.payload, expected[[t for _, t in slots]])
    rows = view.payload.float()
assert backend.recv_tokens(handle) == len(view.payload)
sums = backend.combine_transformed(problem, handle, rows.bfloat16())
wanted = expected[mine].float() * weights[mine].sum(1, keepdim=True)
assert (sums.float() - wanted).abs().max() <= 0.03 * wanted.abs().max()

handle = backend.dispatch(problem)  # as it is timed
backend.stage(problem, handle)
again = backend.combine(problem, handle)
places = torch.zeros(TOKENS, 2).scatter_(1, ids[mine] // 4, 1.0).sum(1)
factor = places if mode == "normal" else weights[mine].sum(1)
assert torch.allclose(again.float(), expected[mine].float() * factor[:, None], rtol=0.02, atol=0.02)
backend.finalize(0)
"""


@pytest.mark.parametrize("mode, precision", MODES)
def test_rows_and_sums(mode, precision, tmp_path):
    given = [mode, precision, tmp_path / "store", FOLDER]
    code = textwrap.dedent(RANK)
    ranks = run_programs(tmp_path, [(code, [rank, *given], None) for rank in range(2)])
    assert [status for status, _ in ranks] == [0, 0], ranks


def test_a_checkout_is_asked_for(tmp_path):
    ((status, said),) = run_file(tmp_path, FOLDER / "run.py", [tmp_path, "--device", "cpu"])
    assert status == 2
    assert "no checkout of CollectiveX" in said and str(tmp_path) in said


#: Files of a checkout, with no more than what add_backend.py changes in each.
CHECKOUT = {
    "sweep_matrix.py": "BACKEND_PRECISIONS = {\n}\n",
    "bench/ep_harness.py": "",
    "bench/run_ep.py": (
        '    choices=["deepep-v2", "mori"]\n    if args.backend in ("mori", "x"):\n'
        "    else:\n        from ep_deepep_v2 import Backend\n"
    ),
    "runtime/prepare_backend.sh": "    mori)\n",
    "launchers/launch_single-slurm.sh": "  deepep-v2 | nccl-ep) ;;\n",
    "launchers/launch_gb-nv.sh": "  deepep-v2 | nccl-ep) ;;\n",
    "configs/platform_config.json": json.dumps(
        {
            "backend_maturity": {},
            "platforms": {
                "h200": {"gpus_per_node": 8, "backends": {"deepep-v2": [8, 16]}},
                "gb200": {"gpus_per_node": 4, "backends": {"deepep-v2": [8]}},
            },
        }
    ),
}


def added(tmp_path, files):
    """Runs add_backend.py on a checkout of these files: its status, what it said, the files."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tests").mkdir(exist_ok=True)
    ((status, said),) = run_file(tmp_path, FOLDER / "add_backend.py", [tmp_path])
    return status, said, {name: (tmp_path / name).read_text() for name in files}


def test_a_checkout_gets_the_backend(tmp_path):
    status, said, after = added(tmp_path, CHECKOUT)
    assert status == 0, said
    assert '"waybill": ("bf16", "fp8")' in after["sweep_matrix.py"]
    assert after["bench/run_ep.py"].count("waybill") == 4
    assert after["bench/run_ep.py"].index("from ep_waybill") < after["bench/run_ep.py"].index(
        "else:"
    )
    assert after["launchers/launch_gb-nv.sh"] == "  deepep-v2 | waybill | nccl-ep) ;;\n"
    platforms = json.loads(after["configs/platform_config.json"])["platforms"]
    assert platforms["h200"]["ll_backends"] == {"waybill": [8]}
    assert "waybill" not in platforms["gb200"]["backends"]
    assert (tmp_path / "bench/ep_waybill.py").read_text() == (FOLDER / "ep_waybill.py").read_text()
    assert (tmp_path / "tests/test_waybill.py").exists()
    status, said, again = added(tmp_path, after)
    assert status == 1 and "there already" in said and again == after


def test_a_checkout_of_another_version_stays(tmp_path):
    other = CHECKOUT | {"runtime/prepare_backend.sh": "nothing\n"}
    status, said, after = added(tmp_path, other)
    assert status == 1 and "runtime/prepare_backend.sh" in said and after == other
    assert not (tmp_path / "bench/ep_waybill.py").exists()
