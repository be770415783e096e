"""Every way with every edge on CPU ranks, and the page that says what was right where."""

import argparse
import dataclasses
import inspect
import os
import pathlib
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest

pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "ways_and_edges.md"
sys.path.append(str(ROOT / "tests" / "ways"))

import judge  # noqa: E402
import run as program  # noqa: E402
import table  # noqa: E402
from edges import ExpertSizes, expert_case  # noqa: E402
from ranks import WAYS, Threads, run_cell  # noqa: E402

AGAIN = "run: python tests/ways/run.py --device cpu --write docs/ways_and_edges.md"


def test_every_way_has_an_entry_for_every_edge():
    known = table.read(PAGE)
    for column, cells in known["cells"].items():
        unknown = {name: set(edges) - set(WAYS[name].edges) if name in WAYS else "no such way"
                   for name, edges in cells.items()}  # fmt: skip
        assert not any(unknown.values()), (column, unknown)
    for way in WAYS.values():
        for edge in way.edges:
            result, words = table.cell_of(known, "cpu", way.name, edge)
            assert result in ("right", "refused", "none"), f"{way.name}, {edge}: {words}; {AGAIN}"
            assert result == "right" or words, (way.name, edge)


def test_the_page_is_made_of_its_numbers():
    known, text = table.read(PAGE), PAGE.read_text("utf-8")
    again = table.page_of(known).replace(table.STALE, "")
    assert text.replace(table.STALE, "") == again, (
        "run: python tests/ways/run.py --page " + PAGE.name
    )


def test_words_are_one_line_and_do_not_say_where_the_tree_lies(tmp_path):
    words = f"cannot open {table.ROOT}/build/site/library.so\nwith advice"
    table.update(tmp_path / "page.md", "cpu", {("node_counting", "ordinary"): ("refused", words)})
    kept = table.read(tmp_path / "page.md")["cells"]["cpu"]["node_counting"]["ordinary"]
    assert kept == ["refused", "cannot open build/site/library.so"]


@pytest.mark.filterwarnings("default")
def test_columns_of_gpus_say_of_what_code_they_are():
    known = table.read(PAGE)
    for column in ("gpu", "gpus"):
        for family, run in known["runs"][column].items():
            assert len(run["code"]) == len(table.code_hash(family))
            if table.stale(known, column, family):
                warnings.warn(
                    f"ways and edges: {table.TITLES[family]}, {table.COLUMNS[column]}: stale, of"
                    f" {run['date']}, code {run['code']}",
                    stacklevel=1,
                )


@pytest.mark.xdist_group("processes")
def test_all_cells_of_cpu_ranks_are_as_the_page_says(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "tests/ways/run.py", "--write", tmp_path / "now.md"],
        capture_output=True, text=True, timeout=600, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    now, known = (table.read(page)["cells"]["cpu"] for page in (tmp_path / "now.md", PAGE))
    assert now.keys() == known.keys()
    for name, edges in now.items():
        for edge, found in edges.items():
            assert found[0] == known[name][edge][0], f"{name}, {edge}: {found}; {AGAIN}"


@pytest.mark.parametrize(("shell", "words"), [
    ("echo good day", "did not start: answered: good day"),
    ("echo 3", "did not start: answered: 3"),
    ('"$0" "$@" | (read ready; echo "$ready"; echo good day)', "answered: good day"),
])  # fmt: skip
def test_a_worker_that_gives_no_answers(shell, words):
    """The thread that read its line ended, the run did not: "0 right", with status 0."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests/ways/run.py", "--only", "node_counting", "--edge",
         "ordinary", "--under", f"sh -c '{shell}'"],
        capture_output=True, text=True, timeout=300, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert f"WRONG  node_counting : ordinary\n    {words}\n" in done.stdout
    assert "0 right, 0 refused, 1 wrong, 0 not run, 0 no time, 0 without a result" in done.stdout


def given_of(**options):
    wanted = {"device": "cpu", "only": "node_counting", "edge": "*", "ranks": None, "jobs": 2,
              "as_processes": False, "under": "", "patience": 1.0, "limit_s": 60.0}  # fmt: skip
    return argparse.Namespace(**{**wanted, **options})


def test_cells_without_a_result_are_counted(monkeypatch, capsys):
    """A thread of the program itself fails."""
    failed = []
    monkeypatch.setattr(threading, "excepthook", lambda given: failed.append(given.exc_value))
    monkeypatch.setattr(program.Run, "_worker", lambda self, cells: None)
    monkeypatch.setattr(program.Run, "_group", lambda self, cells, worker: 1 / 0)
    results = program.run_all(given_of(), lambda results: None)
    assert [type(error) for error in failed] == [ZeroDivisionError]
    wanted = program.cells_of([WAYS["node_counting"]], given_of())
    assert len(wanted) > 5 and results == dict.fromkeys(wanted, program.NO_RESULT)
    assert program.summary(results) == 1
    assert f"0 no time, {len(wanted)} without a result\n" in capsys.readouterr().out


def test_a_run_whose_time_is_over_does_not_pass(monkeypatch, capsys):
    monkeypatch.setattr(program.Run, "_worker", lambda self, cells: None)
    results = program.run_all(given_of(limit_s=0.0), lambda results: None)
    assert {result for result, _ in results.values()} == {"no time"}
    assert program.summary(results) == 3
    assert f"{len(results)} no time, 0 without a result\n" in capsys.readouterr().out
    assert program.summary({**results, ("way", "edge"): ("wrong", "")}) == 1


def test_a_run_of_no_cell_fails(monkeypatch, capsys):
    given = given_of(only="node_countin")
    assert program.run_all(given, lambda results: None) == {}
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", given.only])
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    assert program.main() == 1 and "0 right" in capsys.readouterr().out


def test_memory_is_what_an_edge_asks_for():
    from device import tensor_of

    sizes = ExpertSizes(3, 3, 200, 64, 2, 9)
    for edge, has_memory in (("null", False), ("slice", True)):
        how = expert_case(edge, sizes).rounds[1]
        assert how.counts[0] == 0
        for array in (np.zeros((0, 64), np.float32), how.ids[0]):
            tensor = tensor_of(array, "cpu", None, how)
            assert tensor.shape == array.shape
            assert (tensor.untyped_storage().nbytes() > 0) == has_memory
            assert tensor.data_ptr() == 0  # torch gives no other address of no elements
    how = expert_case("odd_rows", sizes).rounds[1]
    tensor = tensor_of(np.ones((3, 37), np.float32), "cpu", None, how)
    assert tensor.is_contiguous() and tensor.data_ptr() % 16 and (tensor == 1).all()


def altered(arrays):
    """The same with one array changed, for each that has elements; its name first."""
    for name, array in arrays.items():
        if array.size:
            changed = array.copy()
            changed.reshape(-1)[-1:].view(np.uint8)[0] ^= 1
            yield name, {**arrays, name: changed}
        yield (
            name,
            {**arrays, name: np.concatenate([array, array[:1], array[:1]])[: len(array) + 1]},
        )


@pytest.mark.parametrize("name", ["node_padded", "nodes_compact", "node_quantized"])
def test_the_judge_finds_one_bit_in_any_array(name):
    way = WAYS[name]
    case = next(way.cases("ordinary"))
    calls = way.calls(case)
    right = [
        [[judge.ExpertJudge(call).wanted(rank) for call in of_round] for of_round in calls]
        for rank in range(case.sizes.world)
    ]
    assert not way.complaints(case, right)
    for changed, arrays in altered(right[1][0][0]):
        wrong = [list(map(list, of_rank)) for of_rank in right]
        wrong[1][0][0] = arrays
        found = way.complaints(case, wrong)
        assert len(found) == 1 and changed in found[0] and "rank 1" in found[0], (changed, found)


def test_a_way_that_loses_a_row_is_found(monkeypatch):
    """Also where it is the row of one edge alone."""
    import experts

    real = experts._call

    def loses(layer, given, layout, views, present=None):
        found = real(layer, given, layout, views, present)
        if min(given.call.counts) == 0 and layer.rank == 0:
            found["rows"] = torch_of(found["rows"])
        return found

    monkeypatch.setattr(experts, "_call", loses)
    threads, way = Threads("cpu"), WAYS["nodes_129"]
    assert run_cell(threads, way, "ordinary").result == "right"
    outcome = run_cell(threads, way, "null")
    assert outcome.result == "wrong" and "rows has shape" in outcome.words


def torch_of(rows):
    import torch

    return torch.cat([rows, rows.new_zeros(600, rows.shape[1])])


def test_what_ranks_say_is_refused_or_wrong():
    threads = Threads("cpu")
    way = dataclasses.replace(WAYS["node_counting"], rows="no such rows")
    outcome = run_cell(threads, way, "ordinary")
    assert outcome.result == "refused" and 'rows = "no such rows"' in outcome.words
    broken = dataclasses.replace(WAYS["sequence_dispatch"], parts=None)
    outcome = run_cell(threads, broken, "ordinary")
    assert outcome.result == "wrong" and outcome.words.startswith("rank 0: TypeError")


def test_edges_are_what_their_titles_say():
    sizes = ExpertSizes(3, 3, 200, 64, 2, 9)
    made = {edge: expert_case(edge, sizes) for edge in WAYS["node_counting"].edges}
    empty = [round_.counts.index(0) for round_ in made["null"].rounds if 0 in round_.counts]
    assert empty == [0, 1, 2]
    assert all(count == 200 for round_ in made["full"].rounds for count in round_.counts)
    assert all((ids == -1).all() for ids in made["dropped"].rounds[0].ids)
    for round_, expert in zip(made["one_expert"].rounds, (0, 8)):
        assert {int(e) for ids in round_.ids for e in ids.ravel()} == {-1, expert}
    chosen = {int(e) for ids in made["of_nobody"].rounds[0].ids for e in ids.ravel()}
    assert not chosen & {1, 6, 7, 8}
    assert all((ids[:, :1] == ids).all() for ids in made["repeated"].rounds[0].ids)
    assert made["odd_rows"].sizes.hidden * 2 % 16
    assert made["one_each"].sizes.local == 1 and made["one_rank"].sizes.world == 1


#: The arguments of calls that move rows, by the way that has each; "all" have it, or "none" moves
#: other rows by it. A new argument is a new way, or is named here.
ARGUMENTS = {
    "EPAll2AllLayer": {
        "all": "ep_group max_tokens hidden topk rank num_tot_experts local_world_size world_size"
        " dtype weight_dtype num_sm dropped_id capacity",
        "none": "use_aot max_per_expert device combine",
        "node_local": "enable_local_combine", "node_compact": "rows",
        "node_padded": "expert_alignment", "node_scaled": "payload", "node_fixed": "fixed_rows",
        "node_views": "copy_out",
        "spare_counting": "spare_experts", "spare_limits": "limit min_rows",
        "format_mxfp8_tiles": "scale_layout",
    },
    "EPAll2AllLayer.dispatch": {
        "all": "self input exp_indices weight", "none": "copy_out",
        "node_positions": "full_scatter_indices", "node_scaled": "scales",
        "node_known": "layout_desc", "spare_present": "present",
    },
    "EPAll2AllLayer.combine": {
        "all": "self input ep_a2a_layout_desc", "node_weighted": "weighted biases",
    },
    "SequenceDispatcher": {
        "all": "world chunk_bytes", "none": "max_window_bytes",
        "sequence_copy_engines": "num_sms local_by_copy_engine", "sequence_relay": "relay",
    },
    "SequenceDispatcher.dispatch": {"all": "self plan tensors", "none": "of_dispatch"},
    "SequenceDispatcher.kv_gradient": {
        "all": "self plan gradients", "none": "of_dispatch out dtype",
    },
}  # fmt: skip


@pytest.mark.parametrize("call", ARGUMENTS)
def test_every_argument_of_a_call_has_a_way(call):
    import waybill.torch
    import waybill.torch.moe

    name, _, method = call.partition(".")
    owner = getattr(waybill.torch.moe, name, None) or getattr(waybill.torch, name)
    found = set(inspect.signature(getattr(owner, method) if method else owner).parameters)
    named = [argument for arguments in ARGUMENTS[call].values() for argument in arguments.split()]
    assert found == set(named) and len(named) == len(found)
    assert set(ARGUMENTS[call]) - {"all", "none"} <= set(WAYS)
