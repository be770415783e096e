"""The instruments in scripts/ find what is planted for them."""

import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from rank_processes import run_file, run_programs

SCRIPTS = pathlib.Path(__file__).resolve().parent.parent.parent / "scripts"


def test_the_files_that_kernels_include(project):
    script = project(
        "trace_call",
        {
            "src/cuda/experts/rows.cu": '#include "../device/signal.cuh"\n#include <vector>\n',
            "src/cuda/device/signal.cuh": '#include "fault.h"\n',
            "src/cuda/device/fault.h": '#include "waybill/core/rank.h"\n',
            "src/cuda/device/other.h": "",
            "include/waybill/core/rank.h": "",
        },
    )
    assert script.closure(["src/cuda/experts/rows.cu"]) == [
        "src/cuda/device/fault.h",
        "src/cuda/device/signal.cuh",
        "src/cuda/experts/rows.cu",
    ]
    with pytest.raises(SystemExit, match=r"src/cuda/experts/gone\.cu is not there"):
        script.closure(["src/cuda/experts/gone.cu"])


def test_the_functions_of_a_call(project, tmp_path, monkeypatch):
    package = tmp_path / "package"
    script = project(
        "trace_call",
        {
            "package/a.py": "from b import inner\nimport os.path\n\n\ndef outer():\n"
            "    os.path.join('a')\n    return [inner(i) for i in range(2)]\n",
            "package/b.py": "def inner(i):\n    return i\n\n\ndef unused():\n    pass\n",
        },
    )
    monkeypatch.syspath_prepend(str(package))
    a = importlib.import_module("a")
    with script.PythonTrace(package) as trace:
        a.outer()
    assert trace.functions == {"a.py": ["outer"], "b.py": ["inner"]}


COUNTED = "int f(int a) {\n  if (a > 1) {\n    return 1;\n  }\n  return 2;\n}\n"


@pytest.mark.skipif(not (shutil.which("g++") and shutil.which("gcov")), reason="no g++ or gcov")
def test_the_lines_that_ran(project, tmp_path, monkeypatch):
    script = project(
        "trace_call",
        {
            "src/a.cpp": f"{COUNTED}int g() {{ return 3; }}\nint main() {{ return f(1) - 2; }}\n",
            "src/b.cpp": "int h() { return 3; }\n",
        },
    )
    flags = ["--coverage", "-fprofile-abs-path", "-O0", "-o", "a.out"]
    sources = [str(tmp_path / "src" / name) for name in ("a.cpp", "b.cpp")]
    subprocess.run(["g++", *flags, *sources], check=True, cwd=tmp_path)
    counters = tmp_path / "counters"
    env = {**os.environ, "GCOV_PREFIX": str(counters)}
    subprocess.run([tmp_path / "a.out"], check=True, env=env)
    monkeypatch.setattr(importlib.import_module("coverage_table"), "ROOT", tmp_path)
    assert script.lines_of(counters) == {"src/a.cpp": 4}


def test_the_way_of_a_call(tmp_path):
    pytest.importorskip("torch")
    ((status, text),) = run_file(tmp_path, SCRIPTS / "trace_call.py", ["attention"])
    assert status == 0 and text.startswith("attention: "), text
    for file in ("python/waybill/torch/", "src/cuda/sequence/kv_gradient.cu"):
        assert file in text, text


RUN_CALL = """
import sys
sys.path.insert(0, sys.argv[1])
import trace_call
trace_call.run_call(sys.argv[2], False, sys.argv[3])
"""


@pytest.mark.parametrize(
    "call, python, kernel",
    [
        ("experts", "torch/experts/", "src/cuda/experts/rows.cu"),
        ("sequences", "sequence_dispatcher.py", "src/cuda/sequence/dispatch_tma.cu"),
    ],
)
def test_the_way_of_each_call(project, tmp_path, call, python, kernel):
    """Forked: the program starts a process of its own for each call."""
    pytest.importorskip("torch")
    out = tmp_path / "functions.json"
    ends = run_programs(tmp_path, [(RUN_CALL, [SCRIPTS, call, out], None)])
    assert ends == [(0, "")]
    assert any(file.startswith(python) for file in json.loads(out.read_text()))
    script = project("trace_call", {kernel: ""})
    assert kernel in script.closure([k for k in script.KERNELS[call] if k == kernel])


def test_the_share_of_lines_that_tests_run(project, tmp_path, capsys):
    python = {"executed_lines": [1, 2, 4], "missing_lines": [6]}
    script = project(
        "coverage_table",
        {
            "python/waybill/moe/a.py": "",
            "scripts/x": "",
            "python.json": json.dumps({"files": {"/tmp/site/waybill/moe/a.py": python}}),
        },
    )
    (tmp_path / "build").mkdir()
    assert script.main([str(tmp_path / "build"), str(tmp_path / "python.json")]) == 0
    table = json.loads((tmp_path / "scripts/coverage.json").read_text())
    assert table == {"python/waybill/moe": {"lines": 4, "run": 3, "percent": 75.0}}

    other = tmp_path / "old.json"
    for percent, status in ((75.2, 0), (80.0, 1)):
        table["python/waybill/moe"]["percent"] = percent
        other.write_text(json.dumps(table))
        assert script.main(["--compare", str(other)]) == status
    assert "python/waybill/moe: 75.0 % of its lines run, before 80.0 %" in capsys.readouterr().out


BENCHES = SCRIPTS.parent / "bench" / "gpu"


def printed(source, row, *values):
    """A line as a bench program prints it: with the format that its source has for such a row."""
    text = (BENCHES / source).read_text(encoding="utf-8")
    (format_,) = (f for f in re.findall(r'"(%-\d+s %4d [^"]*)"', text) if f.startswith(row))
    return (format_ % values).replace("\\n", "")


def moe_output(scale=1.0):
    """As waybill_bench_gpu_moe's, of all that bench_ab.py asks for."""
    call, head = "%-46s %4d", "call                SMs        us  graph us   wire MB copies MB"
    lines = ["2 GPUs; slowest rank's median of 30 calls, from event to event",
             "link: push 8 SMs 338, 16 SMs 323, 132 SMs 351; pull 16 SMs 323 GB/s"]  # fmt: skip
    names = ("counting and placing alone", "dispatch bf16, grouped, with counting",
             "combine bf16 of grouped rows", "the same, rows copied to the window",
             "dispatch bf16, compact, cached", "combine bf16, a row per token and rank",
             "dispatch fp8 + scales, compact, cached",
             "pair: dispatch with counting, combine")  # fmt: skip
    for tokens, us in ((1, 9.5), (128, 22.4), (4096, 497.3)):
        lines += ["", f"{tokens} x 7168, top-8 of 256; 2 ranks, 2 on a node", head]
        for name in names:
            slow = scale if (tokens, name[:8]) == (4096, "dispatch") else 1
            values = (name, 16, us * slow, us / 2, 33.1, 58.7, 90.2, 27.3)
            lines.append(printed("moe_main.cpp", call, *values))
        values = ("combine bf16, local combine", 64, 31.0, 24.2, 33.1, 0.0, 90.2, 27.3)
        lines.append(printed("moe_main.cpp", call, *values))
    lines += ["", "-- spare experts per rank: 2", "1 x 7168, top-8 of 256; 2 ranks, 2 on a node"]
    lines.append(printed("moe_main.cpp", call, names[0], 16, 12.0, 9.0, 0.0, 0.0, 0.0, 0.0))
    return "\n".join(lines)


def sequence_output():
    lines = ["2 ranks on 2 GPUs, bfloat16; slowest rank's median of 60 calls"]
    for name in ("empty plan", "uniform 1 MiB, rows of 8192 B", "uniform 8 MiB, rows of 8192 B",
                 "uniform 64 MiB, rows of 8192 B"):  # fmt: skip
        values = (name, 16, 1.0, 12.5, 8.1, 3.0, 84.0, 26.1, 24.0, 310.0)
        lines.append(printed("sequence_main.cpp", "%-34s", *values))
    return "\n".join(lines)


def host_output():
    names = ("compile_spread_plan/1000", "compile_documents/wlbllm/4")
    items = [
        {"name": n, "run_type": "iteration", "real_time": 2.5, "time_unit": "ms"} for n in names
    ]
    return json.dumps({"benchmarks": items})


def bench_programs(folder, moe):
    """Programs that print what such have printed. @param moe script that prints the first's"""
    folder.mkdir()
    (folder / "sequence.txt").write_text(sequence_output())
    (folder / "host.txt").write_text(host_output())
    for name, script in (
        ("waybill_bench_gpu_moe", moe),
        ("waybill_bench_gpu_sequence", f"cat {folder}/sequence.txt"),
        ("waybill_bench", f"cat {folder}/host.txt"),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return str(folder)


def test_figures_of_bench_programs(project):
    script = project("bench_ab")
    moe, sequence = script.parse_moe(moe_output()), script.parse_sequence(sequence_output())
    cached = ("4096 x 7168, top-8 of 256", "dispatch bf16, compact, cached", 16)
    assert (moe[(*cached, "us")], moe[(*cached, "graph us")]) == (497.3, 248.7)
    titled = "spare experts per rank: 2: counting and placing alone"
    assert moe["1 x 7168, top-8 of 256", titled, 16, "us"] == 12.0
    assert sequence["empty plan", "", 16, "graph us"] == 8.1
    assert sequence["uniform 8 MiB, rows of 8192 B", "", 16, "us"] == 12.5
    assert script.parse_host(host_output())["compile_spread_plan/1000", "", 0, "us"] == 2500.0
    with pytest.raises(SystemExit, match="no figure 2 x 7168, a, 16 SMs, us"):
        script.figure_in(moe, ("2 x 7168", "a", 16, "us"))
    figures = [f for part in (script.MOE, script.SEQUENCE, script.HOST) for f in part.values()]
    assert sum(map(len, figures)) == 20


@pytest.mark.parametrize(
    "old, new, direction",
    [(100, 103, 1), (100, 101.9, 0), (10, 10.4, 0), (10, 10.6, 1), (100, 97, -1)],
)
def test_what_is_slower(project, old, new, direction):
    assert project("bench_ab").direction(old, new) == direction


def test_a_slower_program_is_found(project, tmp_path, capsys):
    script = project("bench_ab")
    for name, scale in (("fast", 1.0), ("slow", 1.05)):
        (tmp_path / f"{name}.txt").write_text(moe_output(scale))
    old = bench_programs(tmp_path / "old", f"cat {tmp_path}/fast.txt")
    same = bench_programs(tmp_path / "same", f"cat {tmp_path}/fast.txt")
    new = bench_programs(tmp_path / "new", f"cat {tmp_path}/slow.txt")
    # Slow in its first runs alone, as by something else on the machine.
    once = bench_programs(
        tmp_path / "once",
        f'echo >>{tmp_path}/runs; [ "$(wc -l <{tmp_path}/runs)" -gt 6 ] &&'
        f" cat {tmp_path}/fast.txt || cat {tmp_path}/slow.txt",
    )
    assert script.main(["--rounds", "3", old, same]) == 0
    assert "0 of 20 figures slower" in capsys.readouterr().out
    assert script.main(["--rounds", "3", old, new]) == 1
    text = capsys.readouterr().out
    assert "2 of 20 figures slower" in text and text.count("SLOWER") == 2, text
    assert script.main(["--rounds", "3", new, old]) == 0
    assert capsys.readouterr().out.count(": faster") == 2
    assert script.main(["--rounds", "3", old, once]) == 0
    assert capsys.readouterr().out.count("not again") == 2


def test_the_script_takes_folders_of_programs(tmp_path):
    old = bench_programs(tmp_path / "old", "exit 1")
    new = bench_programs(tmp_path / "new", "exit 1")
    compare = [SCRIPTS / "bench_ab.sh", "--host", "--rounds", "2"]
    assert "0 of 2 figures slower" in subprocess.check_output([*compare, old, new], text=True)
    (tmp_path / "new/host.txt").write_text(host_output().replace("2.5", "2.6"))
    done = subprocess.run([*compare, old, new], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.count("SLOWER") == 2, done.stdout
    done = subprocess.run([*compare, old, tmp_path], capture_output=True, text=True)
    assert done.returncode == 2 and "holds neither bench programs nor a tree" in done.stderr


SASS = """
Fatbin elf code:
================
arch = sm_90a

	code for sm_90a
		Function : _ZN4cuda43_GLOBAL__N__d1508cbe_10_barrier_cu_121fe73514barrier_kernelENS0_1PE
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;       /* 0x00000a00ff017b82 */
                                                                /* 0x000ff00000000800 */
        /*0010*/               @P0 STL [R1], R4 ;               /* 0x00008800ff047b82 */
                                                                /* 0x000e220000000a00 */
        /*0020*/                   NOP ;                        /* 0x0000000000007918 */
                                                                /* 0x000fe20000000000 */
"""
USAGE = """
arch = sm_90a
Resource usage:
 Common:
  GLOBAL:0
 Function _ZN4cuda43_GLOBAL__N__d1508cbe_10_barrier_cu_121fe73514barrier_kernelENS0_1PE:
  REG:42 STACK:8 SHARED:64 LOCAL:0 CONSTANT[0]:624 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("d1508cbe_10_barrier_cu_121fe735", "a1508cbe_10_barriar_cu_021fe735", None),
        ("0x000ff00000000800", "0x000ff00000000801", "text "),
        ("STL [R1], R4", "MOV R1, R4", "spills 1 -> 0"),
        ("REG:42", "REG:43", "registers 42 -> 43"),
        ("SHARED:64", "SHARED:80", "shared 64 -> 80"),
        ("barrier_kernel", "berrier_kernel", "gone"),
        ("NOP ", "EXIT", "instructions 2 -> 3"),
    ],
)
def test_another_machine_code(project, old, new, said):
    script = project("check_machine_code")
    table = script.table_of(script.kernels_in(SASS, USAGE))
    ((name, entry),) = table["sm_90a"].items()
    assert name == "_ZN4cuda12_GLOBAL__N_114barrier_kernelENS0_1PE"
    text = entry.pop("text")
    assert entry == {"instructions": 2, "registers": 42, "shared": 64, "spills": 1}
    entry["text"] = text
    other = script.table_of(script.kernels_in(SASS.replace(old, new), USAGE.replace(old, new)))
    found = [*script.differences(table, other)]
    assert found == [] if said is None else any(said in line for line in found), found


#: Behaves as a program of GoogleTest; "loses" spoils what follows in its process, as a lost device.
GTEST_PROGRAM = """#!{python}
import os, sys, time
TESTS = ["A.loses", "A.after", "A.more", "B.fails", "B.skips", "C.crashes", "C.hangs", "C.last"]
if "--gtest_list_tests" in sys.argv:
    print("Running main() from x.cc\\nA.\\n  loses\\n  after\\n  more\\nB.\\n  fails\\n  skips")
    sys.exit(print("C.\\n  crashes\\n  hangs\\n  last"))
wanted = sys.argv[-1].split("=")[1].split(":")
lost = False
for name in (test for test in TESTS if test in wanted):
    print(f"[ RUN      ] {{name}}", flush=True)
    if name == "C.crashes":
        os.abort()
    if name == "C.hangs":
        time.sleep(60)
    state = "      OK" if name != "B.skips" else " SKIPPED"
    state = "FAILED  " if name == "B.fails" or lost else state
    lost = lost or name == "A.loses"
    print(f"[ {{state}} ] {{name}} (0 ms)", flush=True)
"""


def test_a_failing_test_runs_again_alone(tmp_path):
    program = tmp_path / "tests"
    program.write_text(GTEST_PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    command = [sys.executable, SCRIPTS / "run_gtest.py", program, "--limit-s", "1"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    last = result.stdout.splitlines()[-4:]
    assert last[0].startswith("run_gtest: 4 passed, 1 skipped, 3 failed of 8")
    assert [line.split()[-1] for line in last[1:]] == ["B.fails", "C.crashes", "C.hangs"]
    assert "C.hangs: FAILED: not done after 1.0 s" in result.stdout
