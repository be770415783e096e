"""The names that users of DistCA look for, in both faces, and what importing costs."""

import inspect
import subprocess
import sys
from importlib import metadata as importlib_metadata
from pathlib import Path

import pytest

import waybill

SIGNATURES = {
    "exclusive_cumsum": ["tensor", "dim=0"],
    "prepend_zero": ["tensor", "dim=0"],
    "prepend_zero_fn": ["tensor", "dim=0"],
    "mask_by_neg": ["tensor", "mask"],
    "index_put_with_neg_padding_1d": ["tensor", "src", "index"],
    "compute_metadata": ["seq_len", "global_dispatch", "return_intermediate=False"],
    "compute_metadata_kv": [
        "kv_to_q_mapping", "kv_to_q_rank", "kv_context_size", "q_to_num_kv_seq",
        "q_to_num_kv_token", "seq_len", "num_seqs", "q_dispatch", "q_seq_to_dst=None",
        "max_num_local_seqs=None", "return_intermediate=False",
    ],
    "compute_attn_layout_seqlens": [
        "seq_shard_len", "seq_shard_cumsum", "dispatch", "prepend_zero=True",
        "shard_to_tuple=False",
    ],
    "mlp_layout_packed_params": ["seq_lens"],
    "compute_e2e_metadata": [
        "mlp_seq_len", "mlp_num_seqs", "mlp_q_dispatch", "kv_to_q_mapping", "kv_to_q_rank",
        "kv_context_size", "q_to_num_kv_seq", "q_to_num_kv_token", "return_intermediate=False",
    ],
    "gen_seq_lens": ["world_size", "num_seqs", "total_len", "seed=None", "uniforms=None"],
    "create_raw_qkv_dispatch": [
        "world_size", "total_seq_len", "num_seqs", "max_cp_degree",
        "return_mlp_no_shard_seq_lens=False", "seed=None",
    ],
    "create_qkv_dispatch": [
        "world_size", "total_seq_len", "num_seqs", "max_cp_degree", "return_intermediate=False",
        "return_mlp_no_shard_seq_lens=False", "seed=None",
    ],
    "create_qkv_dispatch_with_custom_mapping": [
        "world_size", "seq_lens", "cp_num", "cp_dst", "seq_shard_lens",
        "return_intermediate=False", "return_mlp_no_shard_seq_lens=False", "verbose=False",
    ],
    "orchestrate_simulate": ["tensor", "output_tensor", "metadata"],
    "simulate_communication": ["tensors", "metadata"],
    "sum_kv_copies": ["planes", "metadata", "rank", "output=None", "num_threads=0"],
    "test_qkv_dispatch": ["args=None"],
    "Metadata": [
        "dst_rank", "dst_offset", "seq_len", "num_recv_tokens", "seq_recv_mask=None",
        "recv_seq_lens=None", "num_seqs=None", "world_size=None", "normalized=False",
        "num_total_recv_tokens=None",
    ],
}  # fmt: skip
METHODS = ("get_slice", "normalize_dtype", "cuda", "to_json", "from_json", "_repr_html_")
PACKAGE = Path(waybill.__file__).parent


def positional(function):
    """What can be given by position, with defaults."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in parameters
        if p.kind in kinds
    ]


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_their_order(face, name):
    assert positional(getattr(face.module, name)) == SIGNATURES[name]


def test_more_than_the_original_takes_is_by_keyword(face):
    for name in ("compute_metadata", "orchestrate_simulate", "simulate_communication", "validate"):
        parameters = inspect.signature(getattr(face.module, name)).parameters.values()
        extra = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert extra & {"undispatched", "overlap", "q_capacity"}


def test_metadata_has_the_methods(face):
    for name in METHODS:
        assert callable(getattr(face.module.Metadata, name)), name
    for name in ("plot_traffic", "plot_load"):
        assert callable(getattr(face.module.Metadata, name))
        assert callable(getattr(face.module.QkvPlan, name))


def test_all_is_complete_and_documented(face):
    module = face.module
    assert len(set(module.__all__)) == len(module.__all__)
    assert set(SIGNATURES) | {"validate"} <= set(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        assert name == "__version__" or value.__doc__, name
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public <= set(module.__all__)


def test_the_faces_have_the_same_functions():
    pytest.importorskip("torch")
    import waybill.torch as wt

    only_numpy = {"__version__", "source_rows"}
    assert set(waybill.__all__) - set(wt.__all__) == only_numpy
    assert set(wt.__all__) - set(waybill.__all__) == {
        "AttentionStep",
        "BatchPlan",
        "BatchPlanner",
        "Capacities",
        "ContextParallelAttention",
        "FixedPlan",
        "InPlaceRule",
        "PackedBatch",
        "Piece",
        "calibrate_attention",
        "initialize_distributed",
        "kernels",
        "pack",
        "plan_metadata",
        "recomputed_attention",
        "unpack",
    }


def test_version():
    assert waybill.__version__ == importlib_metadata.version("waybill")


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, **options
    )


def test_import_needs_numpy_alone():
    code = "import sys, waybill; print(*sorted(m.split('.')[0] for m in sys.modules))"
    result = run("-c", code)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert "numpy" in loaded and not loaded & {"torch", "matplotlib", "ml_dtypes", "pandas"}


def test_without_torch_the_error_says_so():
    code = "import sys; sys.modules['torch'] = None\nimport waybill\nimport waybill.torch"
    result = run("-c", code)
    assert result.returncode == 1 and "ModuleNotFoundError" in result.stderr
    assert "torch" in result.stderr.splitlines()[-1]


def test_a_program_ends_quietly():
    """Objects that live to the end, in globals and caches, are no reason to complain."""
    code = (
        "import functools, waybill\n"
        "plan = waybill.QkvPlan(1, [0, 1], [3], [0], [0, 1], [0])\n"
        "table, _ = waybill.compute_metadata([[3]], [[0]])\n"
        "keep = [plan.q_dst, plan.to_metadata(), lambda: plan]\n"
    )
    result = run("-X", "dev", "-c", code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("arguments", [["demo", "--help"], ["--version"], ["--help"]])
def test_the_program(arguments):
    result = run("-m", "waybill", *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "" and "waybill" in result.stdout
    if arguments == ["--version"]:
        assert waybill.__version__ in result.stdout


def test_the_program_prints_errors_and_fails():
    result = run("-m", "waybill", "no-such-command")
    assert result.returncode != 0 and result.stdout == "" and result.stderr


def test_the_program_runs_a_demo(tmp_path):
    result = run("-m", "waybill", "demo", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 200


def editable():
    """Whether the package is imported from somewhere else than where it was installed."""
    files = importlib_metadata.files("waybill") or []
    return not any(Path(str(f.locate())).resolve() == PACKAGE / "__init__.py" for f in files)


@pytest.mark.skipif(editable(), reason="installed in editable mode: files lie apart")
def test_a_wheel_is_typed():
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "_core.pyi").is_file()
    names = {str(f) for f in importlib_metadata.files("waybill")}
    assert {"waybill/py.typed", "waybill/_core.pyi", "waybill/torch/__init__.py"} <= names
    assert "waybill/bin/waybill" in names


def test_the_stub_of_the_compiled_part_is_what_was_compiled():
    """So a type checker notices what the package asks for and is not there."""
    pytest.importorskip("nanobind")
    script = Path(__file__).parents[2] / "scripts" / "make_core_stub.py"
    subprocess.run([sys.executable, script, "--check"], check=True)
