"""mypy --strict on the package; mypy and pyright --strict on programs that use it. Slow, so
scripts/check_wheel.sh runs it: each checker reads numpy and torch, once for all tests. The package
is read, never imported: the wheel's library may be for a later Python than the one that runs mypy.
"""

import ast
import collections
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("mypy")

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(importlib.util.find_spec("waybill").origin).parent  # of any version of Python

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

# Of mypy --strict, what the package's own settings leave out.
USERS = """
[[tool.mypy.overrides]]
module = ["names", "mistakes", "mistakes_with_torch", "program", "with_torch"]
warn_return_any = true
warn_unused_ignores = true
"""

PROGRAMS_WITH_MISTAKES = {
    "mistakes.py": """
import waybill

waybill.gen_seq_lens('two', 1, 1)  # wrong
waybill.exclusive_cumsum([1], dim='x')  # wrong
waybill.orchestrate_simulate([], [])  # wrong
waybill.validate(max_findings='x')  # wrong
waybill.no_such_name  # wrong
waybill.dispatch_kernel  # wrong
waybill.compute_metadata([[1]], [[0]])[2]  # wrong
waybill.orchestrate_simulate([], [1], None) + 'x'  # wrong
waybill.sample_documents(3, 1) + 'x'  # wrong
""",
    "mistakes_with_torch.py": """
import torch

import waybill.torch as waybill


def f(
    attention: waybill.ContextParallelAttention, plan: waybill.BatchPlan, q: torch.Tensor
) -> None:
    attention(plan, q, q, q)[0].no_such_method()  # wrong
    attention(plan, q, q, q, return_lse=True).sum()  # wrong
    attention(plan, q)  # wrong
    plan.no_such_name  # wrong
""",
}


def examples():
    """Their own functions have no annotations, so that --strict is not for them. Those that
    are not here do what torch's stubs do not know."""
    found = [
        path for path in (ROOT / "examples/python").glob("*.py")
        if path.stem not in ("train_moe", "training")
    ]  # fmt: skip
    assert len(found) >= 8
    return found


def names_of(module):
    """The names that a module puts into ``__all__``: its own, and those of other modules."""
    names = []
    for statement in ast.parse((PACKAGE / module).read_text()).body:
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        if getattr(targets[0], "id", None) != "__all__":
            continue
        if isinstance(statement.value, ast.Attribute):
            names += names_of(f"{statement.value.value.id}.py")
        else:
            names += ast.literal_eval(statement.value)
    return names


def all_names():
    names = names_of("__init__.py")
    assert len(names) > 50
    return names


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder with the package's Python files and stubs, and the programs."""
    folder = tmp_path_factory.mktemp("typed")
    shutil.copytree(
        PACKAGE, folder / "waybill",
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )  # fmt: skip
    settings = (ROOT / "pyproject.toml").read_text()
    assert "strict = true" in settings
    (folder / "settings.toml").write_text(settings + USERS)
    names = ["import waybill", *(f"print(waybill.{name})" for name in all_names())]
    (folder / "names.py").write_text("\n".join(names) + "\n")
    for name, text in PROGRAMS_WITH_MISTAKES.items():
        (folder / name).write_text(text)
    # The comment is for pyright: what the others need not keep.
    for name, text in (("program", PROGRAM), ("with_torch", WITH_TORCH)):
        (folder / f"{name}.py").write_text("# pyright: strict\n" + textwrap.dedent(text))
    for path in examples():
        shutil.copy(path, folder)
    return folder


def errors_of(output, pattern):
    """{file: {line of an error: messages}}, of lines of output that fit the pattern."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for line in output.splitlines():
        match = re.match(pattern, line.strip())
        if match:
            found[Path(match["file"]).as_posix()][int(match["line"])].append(line.strip())
    return found


@pytest.fixture(scope="module")
def of_mypy(sources):
    """Errors of mypy --strict in the package and in all programs but the examples."""
    files = ["names.py", "mistakes.py", "mistakes_with_torch.py", "program.py", "with_torch.py"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "settings.toml",
         "--cache-dir", str(ROOT / ".mypy_cache"), "--no-color-output", "waybill", *files],
        cwd=sources, env={"MYPYPATH": str(sources), "PATH": ""}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr  # for the mistakes
    checked = re.search(r"\(checked (\d+) source files\)", done.stdout)
    assert int(checked[1]) == len(files) + len(list((sources / "waybill").rglob("*.py*")))
    return errors_of(done.stdout, r"(?P<file>[^:]+):(?P<line>\d+): error: ")


@pytest.fixture(scope="module")
def of_pyright(sources):
    """Errors of pyright of scripts/locked in all programs, which find torch and numpy where the
    tests do: --strict for those that say so."""
    files = sorted(path.name for path in sources.glob("*.py"))
    settings = {
        "typeCheckingMode": "standard", "include": files, "extraPaths": [str(sources)],
        # For a checker a docstring may be None, and so may the weights of a dispatch; a name
        # that is set under a condition may be unset.
        "reportOptionalMemberAccess": False, "reportOptionalSubscript": False,
        "reportPossiblyUnboundVariable": False,
    }  # fmt: skip
    (sources / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [shutil.which("pyright"), "-p", str(sources), "--pythonpath", sys.executable]
    done = subprocess.run([*command, "--outputjson"], capture_output=True, text=True, timeout=600)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(files), done.stdout + done.stderr
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for one in report["generalDiagnostics"]:
        if one["severity"] == "error":
            line = one.get("range", {"start": {"line": -1}})["start"]["line"] + 1
            found[Path(one["file"]).name][line].append(one["message"])
    return found


@pytest.fixture
def errors(request):
    return request.getfixturevalue(f"of_{request.param}")


def test_the_package(of_mypy):
    found = {file: lines for file, lines in of_mypy.items() if file.startswith("waybill/")}
    assert not found, found


BOTH = pytest.mark.parametrize("errors", ["mypy", "pyright"], indirect=True)


@BOTH
@pytest.mark.parametrize("program", ["program.py", "with_torch.py", "names.py"])
def test_a_users_programs(errors, program):
    assert not errors[program], errors[program]


@BOTH
@pytest.mark.parametrize("program", PROGRAMS_WITH_MISTAKES)
def test_mistakes_are_seen(errors, program):
    lines = PROGRAMS_WITH_MISTAKES[program].splitlines()
    mistakes = [i for i, line in enumerate(lines, start=1) if line.endswith("# wrong")]
    assert len(mistakes) >= 4
    assert sorted(errors[program]) == mistakes, errors[program]


def test_examples(of_pyright):
    found = {path.name: of_pyright[path.name] for path in examples() if of_pyright[path.name]}
    assert not found, found
