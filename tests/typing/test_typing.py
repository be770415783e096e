"""mypy --strict on the package; mypy and pyright --strict on programs that use it. Slow, so
scripts/check_wheel.sh runs it: the first run reads numpy and torch. The package is read, never
imported: the wheel's library may be for a later Python than the one that runs mypy."""

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("mypy")

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(importlib.util.find_spec("waybill").origin).parent  # of any version of Python


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder with the package's Python files and stubs."""
    folder = tmp_path_factory.mktemp("typed")
    shutil.copytree(
        PACKAGE, folder / "waybill",
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )  # fmt: skip
    settings = (ROOT / "pyproject.toml").read_text()
    assert "strict = true" in settings
    (folder / "settings.toml").write_text(settings)
    return folder


def mypy(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "settings.toml",
         "--cache-dir", str(ROOT / ".mypy_cache"), "--no-color-output", *arguments],
        cwd=folder, env={"MYPYPATH": str(folder), "PATH": ""}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip


def pyright(folder, mode, *files):
    """pyright of scripts/locked, on files that find torch and numpy where the tests do."""
    settings = {
        "typeCheckingMode": mode, "include": files, "extraPaths": [str(folder)],
        # For a checker a docstring may be None, and so may the weights of a dispatch; a name
        # that is set under a condition may be unset.
        "reportOptionalMemberAccess": mode == "strict", "reportOptionalSubscript": mode == "strict",
        "reportPossiblyUnboundVariable": mode == "strict",
    }  # fmt: skip
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [shutil.which("pyright"), "-p", str(folder), "--pythonpath", sys.executable]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_package(sources):
    result = mypy(sources, "-p", "waybill")
    assert result.returncode == 0, result.stdout + result.stderr


PROGRAM = """
    import numpy as np

    import waybill

    lens = np.array([[4, 2], [3, 0]])
    fwd, rev = waybill.compute_metadata(lens, np.array([[1, 0], [1, -1]]))
    _, _, (lengths, one_hot, counts) = waybill.compute_metadata(lens, lens - lens, True)
    shapes: tuple[int, ...] = lengths.shape + one_hot.shape + counts.shape
    fwd_q2, _, fwd_k2, _, drawn = waybill.create_qkv_dispatch(2, 8, 2, 2, seed=1)
    rows_of: list[int] = [len(cu) for cu in drawn.cu_seqlens_q]
    sent: int = int(fwd_k2.traffic().sum()) + fwd_q2.dst_rank.ndim
    first: waybill.Metadata = fwd.get_slice(0).normalize_dtype()
    text: str = first.to_json()
    again: waybill.Metadata = waybill.Metadata.from_json(text)
    sums = waybill.exclusive_cumsum(lens, dim=1)
    total: int = int(sums.sum())
    output = waybill.orchestrate_simulate(np.ones((2, 6, 3)), np.zeros((2, 9, 3)), fwd)
    received: list[int] = [len(rows) for rows in waybill.simulate_communication(list(output), fwd)]
    layout = waybill.compute_attn_layout_seqlens(lens, lens, lens, shard_to_tuple=True)
    longest: int = int(layout.max_seqlen_q.max())
    plan = waybill.QkvPlan(1, [0, 1], [3], [0], [0, 1], [0], kv_layout="per_query")
    fwd_q: waybill.Metadata = plan.to_metadata().fwd_q
    share: float = plan.imbalance
    for finding in waybill.validate(fwd, rev, q_capacity=100):
        print(finding.kind.upper(), finding.rank + 1)
    try:
        waybill.gen_seq_lens(0, 1, 1)
    except waybill.InvalidArgument as error:
        print(error)
"""


WITH_TORCH = """
    import torch

    import waybill.torch as waybill
    from waybill.torch.moe import ExpertParallel, SwiGLUExperts


    def rank_main(world: waybill.World) -> float:
        attention = waybill.ContextParallelAttention(world, heads=4, kv_heads=2, head_dim=16)
        plan: waybill.BatchPlan = attention.plan(attention.gather([3, 4]))
        rows = plan.home_tokens[world.rank]
        q, kv = torch.zeros(rows, 4, 16), torch.zeros(rows, 2, 16)
        out: torch.Tensor = attention(plan, q, kv, kv)
        both: tuple[torch.Tensor, torch.Tensor] = attention(plan, q, kv, kv, return_lse=True)
        again: torch.Tensor = attention(plan, q, kv, kv, False)
        made = SwiGLUExperts(4, hidden=64, inner=32)
        layer = ExpertParallel(
            made, num_experts=8, topk=2, hidden=64, max_tokens=64, group=world
        )
        scores, ids = torch.rand(rows, 8).topk(2)
        sums: torch.Tensor = layer(out.flatten(1), scores, ids)
        below = waybill.EPAll2AllLayer(world, 64, 64, 2, world.rank, 8, 2, 2)
        received, weights, layout = below.dispatch(out.flatten(1), ids, scores)
        counts: list[int] = layout.recv_expert_counts.tolist()
        place: torch.Tensor = below.combine_input(len(received))
        print(both[1].shape, again.shape, plan.work.sum(), weights, counts, place.shape)
        return float(sums.sum())


    print(waybill.run_threads(2, rank_main))
"""


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_users_programs(sources, checker):
    (sources / "program.py").write_text(textwrap.dedent(PROGRAM))
    (sources / "with_torch.py").write_text(textwrap.dedent(WITH_TORCH))
    files = ("program.py", "with_torch.py")
    if checker == "pyright":
        result = pyright(sources, "strict", *files)
    else:
        result = mypy(sources, "--follow-imports=silent", "--strict", *files)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "mistake",
    [
        "attention(plan, q, q, q)[0].no_such_method()",
        "attention(plan, q, q, q, return_lse=True).sum()",
        "attention(plan, q)",
        "plan.no_such_name",
    ],
)
def test_mistakes_are_seen_by_pyright(sources, mistake):
    lines = ["import torch", "import waybill.torch as waybill", "def f(", "    attention: waybill."
             "ContextParallelAttention,", "    plan: waybill.BatchPlan, q: torch.Tensor",
             "):", f"    return {mistake}"]  # fmt: skip
    (sources / "mistake.py").write_text("\n".join(lines))
    result = pyright(sources, "standard", "mistake.py")
    assert result.returncode == 1 and "mistake.py:7:" in result.stdout, result.stdout


def test_examples(sources):
    """Their own functions have no annotations, so that --strict is not for them. Those that
    are not here do what torch's stubs do not know."""
    examples = [
        path for path in (ROOT / "examples/python").glob("*.py")
        if path.stem not in ("train_moe", "training")
    ]  # fmt: skip
    assert len(examples) >= 8
    for path in examples:
        shutil.copy(path, sources)
    result = pyright(sources, "standard", *(path.name for path in examples))
    assert result.returncode == 0, result.stdout + result.stderr


def names_of(module):
    """The list of names that a module assigns to ``__all__``."""
    for statement in ast.parse((PACKAGE / module).read_text()).body:
        if isinstance(statement, ast.Assign) and statement.targets[0].id == "__all__":
            return ast.literal_eval(statement.value)
    raise AssertionError(f"{module} has no __all__")


def test_every_name_is_seen(sources):
    modules = ["__init__.py", "_common.py", "routing.py", "simulate.py"]
    names = [name for module in modules for name in names_of(module)]
    assert len(names) > 50
    lines = ["import waybill", *(f"print(waybill.{name})" for name in names)]
    (sources / "names.py").write_text("\n".join(lines))
    result = mypy(sources, "--follow-imports=silent", "--strict", "names.py")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "mistake",
    [
        "waybill.gen_seq_lens('two', 1, 1)",
        "waybill.exclusive_cumsum([1], dim='x')",
        "waybill.orchestrate_simulate([], [])",
        "waybill.validate(max_findings='x')",
        "waybill.no_such_name",
        "waybill.dispatch_kernel",
        "waybill.compute_metadata([[1]], [[0]])[2]",
        "waybill.orchestrate_simulate([], [1], None) + 'x'",
        "waybill.sample_documents(3, 1) + 'x'",
    ],
)
def test_mistakes_are_seen(sources, mistake):
    (sources / "mistake.py").write_text(f"import waybill\n\n{mistake}\n")
    result = mypy(sources, "--follow-imports=silent", "--strict", "mistake.py")
    assert result.returncode == 1 and "mistake.py:3: error" in result.stdout, result.stdout
