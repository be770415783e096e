# Written by scripts/make_core_stub.py. The compiled part is private to the package.
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy.typing
from numpy.typing import NDArray

version: str

cuda_version: str | None

dtype_names: tuple[Any, ...]

short_dtype_names: tuple[Any, ...]

max_file_bytes: int

max_stream_bytes: int

def set_error_types(types: dict[str, Any]) -> None: ...
def late_streams() -> int: ...

max_timeout_s: float

def check_interrupt() -> None: ...
def end_waits() -> None: ...
def interrupt_thread(arg: int, /) -> None: ...

class FailureScope:
    def fail(self, arg: str, /) -> None: ...
    def interrupt(self, arg: str, /) -> None: ...

def enter_scope(arg: FailureScope, /) -> None: ...
def leave_scope() -> None: ...
def get_slice(fields: tuple[Any, ...], rank: int) -> tuple[Any, ...]: ...
def normalize_dtype(fields: tuple[Any, ...]) -> tuple[Any, ...]: ...
def metadata_text(fields: tuple[Any, ...]) -> str: ...
def metadata_to_json(fields: tuple[Any, ...], compact: bool) -> str: ...
def metadata_from_json(text: str, origin: str) -> tuple[Any, ...]: ...
def validate_metadata(fields: tuple[Any, ...], options: tuple[Any, ...]) -> list[Any]: ...
def validate_pair(
    fwd: tuple[Any, ...], rev: tuple[Any, ...], options: tuple[Any, ...]
) -> list[Any]: ...
def validate_plan(plan: Plan, options: tuple[Any, ...]) -> list[Any]: ...
def validate_all(
    plan: Plan,
    fwd_q: tuple[Any, ...],
    rev_q: tuple[Any, ...],
    fwd_kv: tuple[Any, ...],
    rev_kv: tuple[Any, ...],
    layout: tuple[
        Sequence[numpy.typing.NDArray[Any]],
        Sequence[numpy.typing.NDArray[Any]],
        numpy.typing.NDArray[Any],
        numpy.typing.NDArray[Any],
        numpy.typing.NDArray[Any],
        Sequence[numpy.typing.NDArray[Any]],
        Sequence[numpy.typing.NDArray[Any]],
    ],
    options: tuple[Any, ...],
) -> list[Any]: ...
def compute_metadata(
    seq_len: numpy.typing.NDArray[Any],
    global_dispatch: numpy.typing.NDArray[Any],
    return_intermediate: bool,
    keep_undispatched: bool,
    capsules: bool,
    callers_seq_len: bool,
    callers_dispatch: bool,
) -> tuple[Any, ...]: ...
def compute_metadata_kv(
    tables: tuple[
        numpy.typing.NDArray[Any],
        numpy.typing.NDArray[Any],
        numpy.typing.NDArray[Any],
        numpy.typing.NDArray[Any],
        numpy.typing.NDArray[Any],
    ],
    seq_len: numpy.typing.NDArray[Any],
    num_seqs: numpy.typing.NDArray[Any],
    q_dispatch: numpy.typing.NDArray[Any],
    return_intermediate: bool,
) -> tuple[Any, ...]: ...
def compute_attn_layout_seqlens(
    seq_shard_len: numpy.typing.NDArray[Any],
    seq_shard_cumsum: numpy.typing.NDArray[Any],
    dispatch: numpy.typing.NDArray[Any],
    prepend_zero: bool,
    shard_to_tuple: bool,
) -> tuple[Any, ...]: ...
def compute_e2e_metadata(
    mlp_seq_len: numpy.typing.NDArray[Any],
    mlp_num_seqs: numpy.typing.NDArray[Any],
    mlp_q_dispatch: numpy.typing.NDArray[Any],
    tables: tuple[
        numpy.typing.NDArray[Any],
        numpy.typing.NDArray[Any],
        numpy.typing.NDArray[Any],
        numpy.typing.NDArray[Any],
        numpy.typing.NDArray[Any],
    ],
    return_intermediate: bool,
) -> tuple[Any, ...]: ...
def mlp_layout_packed_params(seq_lens: numpy.typing.NDArray[Any]) -> tuple[Any, ...]: ...
def exclusive_cumsum(array: numpy.typing.NDArray[Any], dim: int) -> numpy.typing.NDArray[Any]: ...
def prepend_zero(array: numpy.typing.NDArray[Any], dim: int) -> numpy.typing.NDArray[Any]: ...
def mask_by_neg(
    array: numpy.typing.NDArray[Any], mask: numpy.typing.NDArray[Any]
) -> numpy.typing.NDArray[Any]: ...
def index_put_with_neg_padding_1d(
    array: numpy.typing.NDArray[Any],
    src: numpy.typing.NDArray[Any],
    index: numpy.typing.NDArray[Any],
) -> numpy.typing.NDArray[Any]: ...
def gen_seq_lens(world_size: int, num_seqs: int, total_len: int, seed: int) -> Any: ...
def gen_seq_lens_from(
    world_size: int, num_seqs: int, total_len: int, uniforms: NDArray[Any]
) -> Any: ...
def length_distributions() -> list[str]: ...
def sample_documents(distribution: str, num_tokens: int, seed: int) -> Any: ...
def create_raw_qkv_dispatch(
    world_size: int, total_seq_len: int, num_seqs: int, max_cp_degree: int, seed: int
) -> tuple[Any, ...]: ...
def create_raw_qkv_dispatch_from(
    seq_lens: numpy.typing.NDArray[Any],
    cp_num: numpy.typing.NDArray[Any],
    cp_dst: numpy.typing.NDArray[Any],
) -> tuple[Any, ...]: ...
def create_qkv_dispatch(
    world_size: int,
    total_seq_len: int,
    num_seqs: int,
    max_cp_degree: int,
    seed: int,
    return_intermediate: bool,
) -> tuple[Any, ...]: ...
def create_qkv_dispatch_with_custom_mapping(
    world_size: int,
    seq_lens: numpy.typing.NDArray[Any],
    cp_num: numpy.typing.NDArray[Any],
    cp_dst: numpy.typing.NDArray[Any],
    seq_shard_lens: numpy.typing.NDArray[Any],
    return_intermediate: bool,
) -> tuple[Any, ...]: ...
def orchestrate_simulate(
    tensor: NDArray[Any],
    tensor_dtype: str,
    output: NDArray[Any],
    output_dtype: str,
    fields: tuple[Any, ...],
    overlap: str,
    num_threads: int,
) -> None: ...
def simulate_communication(
    tensors: Sequence[NDArray[Any]],
    dtype: str,
    fields: tuple[Any, ...],
    overlap: str,
    num_threads: int,
) -> list[Any]: ...
def source_rows(
    tensor_shape: Sequence[int], output_shape: Sequence[int], fields: tuple[Any, ...], overlap: str
) -> Any: ...
def sum_kv_copies(
    planes: NDArray[Any],
    planes_dtype: str,
    output: NDArray[Any],
    output_dtype: str,
    rev_kv: tuple[Any, ...],
    rank: int,
    num_threads: int,
) -> None: ...
def test_qkv_dispatch(
    world_size: int,
    total_seq_len: int,
    num_seqs: int,
    max_cp_degree: int,
    hidden_q: int,
    hidden_k: int,
    seed: int,
) -> tuple[Any, ...]: ...
def make_plan(
    world_size: int,
    rank_shard_offsets: Sequence[int],
    shard_len: Sequence[int],
    q_dst: Sequence[int],
    doc_shard_offsets: Sequence[int],
    doc_shards: Sequence[int],
    kv_begin: Sequence[int],
    kv_end: Sequence[int],
    kv_layout: str,
    mask: str,
) -> Plan: ...

class Plan:
    @property
    def world_size(self) -> int: ...
    @property
    def kv_layout(self) -> str: ...
    @property
    def rank_shard_offsets(self) -> Any: ...
    @property
    def shard_len(self) -> Any: ...
    @property
    def q_dst(self) -> Any: ...
    @property
    def doc_shard_offsets(self) -> Any: ...
    @property
    def doc_shards(self) -> Any: ...
    @property
    def kv_begin(self) -> Any: ...
    @property
    def kv_end(self) -> Any: ...
    def __eq__(self, arg: object, /) -> bool: ...
    def to_json(self, arg: bool, /) -> str: ...
    def to_metadata(self, num_threads: int) -> tuple[Any, ...]: ...
    def to_raw_dispatch(self, max_cp_degree: int) -> tuple[Any, ...]: ...
    def shard_work(self) -> Any: ...
    def rank_work(self) -> Any: ...
    def traffic(self) -> tuple[Any, ...]: ...
    def summary_text(
        self, q_row_bytes: int, kv_row_bytes: int, gb_per_s: float, unicode: bool
    ) -> str: ...
    def report_page(
        self, q_row_bytes: int, kv_row_bytes: int, gb_per_s: float, title: str
    ) -> str: ...

def plan_from_json(text: str, origin: str) -> Plan: ...

class SparseMetadata:
    @property
    def world_size(self) -> int: ...
    @property
    def rank_offsets(self) -> Any: ...
    @property
    def seq_len(self) -> Any: ...
    @property
    def copy_offsets(self) -> Any: ...
    @property
    def dst_rank(self) -> Any: ...
    @property
    def dst_offset(self) -> Any: ...
    @property
    def recv_total(self) -> Any: ...
    def __eq__(self, arg: object, /) -> bool: ...

def to_sparse(arg: tuple[Any, ...], /) -> SparseMetadata: ...
def to_dense(arg: SparseMetadata, /) -> tuple[Any, ...]: ...
def to_dense_reverse(arg0: SparseMetadata, arg1: SparseMetadata, /) -> tuple[Any, ...]: ...

class Routing:
    @property
    def per_query(self) -> bool: ...
    @property
    def fwd_q(self) -> SparseMetadata: ...
    @property
    def rev_q(self) -> SparseMetadata: ...
    @property
    def fwd_kv(self) -> SparseMetadata: ...
    @property
    def rev_kv(self) -> SparseMetadata: ...
    def attention_of(self, arg: int, /) -> tuple[Any, ...]: ...

def compute_qkv_routing(plan: Plan, num_threads: int) -> Routing: ...

class VarlenRouting:
    @property
    def fwd_q(self) -> SparseMetadata: ...
    @property
    def rev_q(self) -> SparseMetadata: ...
    @property
    def fwd_kv(self) -> SparseMetadata: ...
    @property
    def sum_kv(self) -> SparseMetadata: ...
    def rank(self, arg: int, /) -> tuple[Any, ...]: ...
    def in_place_share(self) -> float: ...

def compute_varlen_routing(plan: Plan, in_place: bool) -> VarlenRouting: ...

class PlannerOptions:
    pass

def planner_options(
    world_size: int,
    tokens_per_rank: int,
    q_hidden: int,
    kv_hidden: int,
    dtype: str,
    mask: str,
    window: int,
    chunk: int,
    prefix: int,
    prefixes: Sequence[int],
    max_tokens_per_rank: int,
    relay: bool,
    kv_layout: str,
    block_tokens: int,
    ranks_per_node: int,
    imbalance_target: float,
    byte_weight: float,
    message_seconds: float,
    pairs_per_second: float,
    nvlink_bytes_per_second: float,
    network_bytes_per_second: float,
    row_pairs: int,
    shard_pairs: int,
    tails: bool,
) -> PlannerOptions: ...

class RelaySchedule:
    @property
    def empty(self) -> bool: ...
    def hops(self) -> list[Any]: ...

class AttentionPlan:
    @property
    def work(self) -> Any: ...
    @property
    def home_tokens(self) -> Any: ...
    @property
    def attention_tokens(self) -> Any: ...
    @property
    def kv_tokens(self) -> Any: ...
    @property
    def block_work(self) -> int: ...
    @property
    def least_bytes_in(self) -> int: ...
    @property
    def relay(self) -> RelaySchedule: ...
    def bytes_in(self) -> Any: ...
    def bytes_out(self, relay: bool) -> Any: ...
    def limit_seconds(self, relay: bool) -> float: ...
    def imbalance(self) -> float: ...
    def balanced(self) -> bool: ...
    @property
    def plan(self) -> Plan: ...
    def text(self) -> str: ...
    def summary_text(self, gb_per_s: float) -> str: ...
    def report_page(self, gb_per_s: float, title: str) -> str: ...
    def __eq__(self, arg: object, /) -> bool: ...
    def to_json(self, arg: bool, /) -> str: ...
    def validate(self, arg: int, /) -> list[Any]: ...

@overload
def plan_attention(doc_lengths: Sequence[int], options: PlannerOptions) -> AttentionPlan: ...
@overload
def plan_attention(
    rank_doc_lengths: Sequence[Sequence[int]], options: PlannerOptions
) -> AttentionPlan: ...
def check_planner_options(options: PlannerOptions, who: str) -> None: ...
def plan_pieces(counts: Sequence[int], pieces: Sequence[int], options: PlannerOptions) -> Plan: ...
def attention_plan_from_json(text: str, origin: str) -> AttentionPlan: ...

class StepOptions:
    pass

class StepPrediction:
    @property
    def world_size(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def forward_seconds(self) -> float: ...
    @property
    def work(self) -> Any: ...
    @property
    def transfer(self) -> str: ...
    def phases(self) -> list[Any]: ...
    def path(self) -> list[Any]: ...
    def bottleneck(self) -> tuple[Any, ...]: ...
    def phase_table(self) -> str: ...
    def rank_table(self, arg: int, /) -> str: ...
    def __eq__(self, arg: object, /) -> bool: ...

class NamedStep:
    @staticmethod
    def make(arg0: str, arg1: int, arg2: StepPrediction, arg3: int, /) -> NamedStep: ...
    @property
    def name(self) -> str: ...
    @property
    def num_shards(self) -> int: ...
    @property
    def step(self) -> StepPrediction: ...
    @property
    def degree(self) -> int: ...

def step_table(arg: Sequence[NamedStep], /) -> str: ...
def chrome_trace(arg: Sequence[NamedStep], /) -> str: ...
def compare_plans(
    doc_lengths: Sequence[int], planner: PlannerOptions, degree: int, head_dim: int
) -> list[NamedStep]: ...
@overload
def step_options(
    plan: Plan,
    transfer: str,
    phase_seconds: float,
    pull_share: float,
    forward_share: float,
    network_message_seconds: float,
    forward_chunk_bytes: int,
    forward_flops_per_second: float,
    backward_flops_per_second: float,
    q_hidden: int | None = None,
    kv_hidden: int | None = None,
    dtype: str | None = None,
    window: int | None = None,
    chunk: int | None = None,
    ranks_per_node: int | None = None,
    nvlink_bytes_per_second: float | None = None,
    network_bytes_per_second: float | None = None,
    message_seconds: float | None = None,
    pairs_per_second: float | None = None,
    row_pairs: int | None = None,
    shard_pairs: int | None = None,
) -> StepOptions: ...
@overload
def step_options(
    plan: AttentionPlan,
    transfer: str,
    phase_seconds: float,
    pull_share: float,
    forward_share: float,
    network_message_seconds: float,
    forward_chunk_bytes: int,
    forward_flops_per_second: float,
    backward_flops_per_second: float,
    q_hidden: int | None = None,
    kv_hidden: int | None = None,
    dtype: str | None = None,
    window: int | None = None,
    chunk: int | None = None,
    ranks_per_node: int | None = None,
    nvlink_bytes_per_second: float | None = None,
    network_bytes_per_second: float | None = None,
    message_seconds: float | None = None,
    pairs_per_second: float | None = None,
    row_pairs: int | None = None,
    shard_pairs: int | None = None,
) -> StepOptions: ...
@overload
def step_options(
    plan: BatchTables,
    transfer: str,
    phase_seconds: float,
    pull_share: float,
    forward_share: float,
    network_message_seconds: float,
    forward_chunk_bytes: int,
    forward_flops_per_second: float,
    backward_flops_per_second: float,
    q_hidden: int | None = None,
    kv_hidden: int | None = None,
    dtype: str | None = None,
    window: int | None = None,
    chunk: int | None = None,
    ranks_per_node: int | None = None,
    nvlink_bytes_per_second: float | None = None,
    network_bytes_per_second: float | None = None,
    message_seconds: float | None = None,
    pairs_per_second: float | None = None,
    row_pairs: int | None = None,
    shard_pairs: int | None = None,
) -> StepOptions: ...
@overload
def predict_step(plan: Plan, options: StepOptions) -> StepPrediction: ...
@overload
def predict_step(plan: AttentionPlan, options: StepOptions) -> StepPrediction: ...
@overload
def predict_step(plan: BatchTables, options: StepOptions) -> StepPrediction: ...
@overload
def step_remedies(arg0: Plan, arg1: StepPrediction, /) -> list[Any]: ...
@overload
def step_remedies(arg0: AttentionPlan, arg1: StepPrediction, /) -> list[Any]: ...
@overload
def step_remedies(arg0: BatchTables, arg1: StepPrediction, /) -> list[Any]: ...
@overload
def explain_step(arg0: Plan, arg1: StepPrediction, /) -> list[str]: ...
@overload
def explain_step(arg0: AttentionPlan, arg1: StepPrediction, /) -> list[str]: ...
@overload
def explain_step(arg0: BatchTables, arg1: StepPrediction, /) -> list[str]: ...

class BatchTables:
    def __init__(
        self,
        plan: Plan,
        routing: VarlenRouting,
        options: PlannerOptions,
        use: str,
        given: RelaySchedule | None,
    ) -> None: ...
    @property
    def relay(self) -> RelaySchedule: ...
    @property
    def sums(self) -> RelaySchedule: ...

def zigzag_plan(arg0: Sequence[int], arg1: int, arg2: int, arg3: int, arg4: str, /) -> Plan: ...
def per_document_plan(
    arg0: Sequence[int], arg1: int, arg2: int, arg3: int, arg4: str, /
) -> Plan: ...
def static_degree(arg0: int, arg1: int, /) -> int: ...

has_cuda: bool

def num_gpus() -> int: ...
def driver_trouble() -> str: ...
def device_faults() -> list[Any]: ...
def host_id() -> str: ...

class Bootstrap:
    pass

def thread_bootstraps(
    world_size: int, timeout_s: float
) -> tuple[list[Bootstrap], FailureScope]: ...
def environment_bootstrap(timeout_s: float) -> tuple[Bootstrap, int, int]: ...
def report_failed_start(reason: str, patience_s: float) -> None: ...
def callable_bootstrap(
    rank: int,
    world_size: int,
    all_gather: Callable[..., Any],
    tell_failure: Any | None,
    timeout_s: float,
) -> Bootstrap: ...
def thread_world(bootstrap: Bootstrap, ranks_per_node: int) -> World: ...
def process_world(bootstrap: Bootstrap, ranks_per_node: int) -> World: ...
def gpu_thread_world(
    bootstrap: Bootstrap, device: int, ranks_per_node: int, in_step: bool
) -> World: ...
def gpu_process_world(bootstrap: Bootstrap, device: int, ranks_per_node: int) -> World: ...
def nvshmem_world(bootstrap: Bootstrap, device: int, ranks_per_node: int) -> World: ...

class World:
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def ranks_per_node(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def device(self) -> int: ...
    def require_same(self, who: str, mine: Sequence[tuple[str, str]]) -> None: ...
    def use_links(self, arg0: float, arg1: float, arg2: float, arg3: str, /) -> None: ...
    def check_ended(self, arg: str, /) -> None: ...
    def barrier(self) -> None: ...

default_links: tuple[Any, ...]

link_speed_range: tuple[Any, ...]

def links_from_json(arg0: str, arg1: str, /) -> tuple[float, float, float, str]: ...

class PlanHandle:
    @property
    def own_rows(self) -> list[int]: ...
    @property
    def window_rows(self) -> list[int]: ...
    @property
    def window_offsets(self) -> list[int]: ...
    @property
    def window_bytes(self) -> int: ...
    @property
    def way(self) -> str: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def wire_bytes(self) -> list[int]: ...

class ShownWindow:
    @property
    def bytes(self) -> Any: ...
    @property
    def made(self) -> Any: ...
    @made.setter
    def made(self, arg: Any | None, /) -> None: ...

class SequenceOptions:
    pass

def sequence_options(
    num_sms: int, chunk_bytes: int, local_by_copy_engine: bool, max_window_bytes: int, relay: str
) -> SequenceOptions: ...

class Dispatcher:
    def __init__(self, arg0: World, arg1: SequenceOptions, /) -> None: ...
    def plan(
        self,
        gradient: bool,
        parts: Sequence[tuple[SparseMetadata, Sequence[tuple[str, int]], RelaySchedule, int, int]],
        stream: int,
    ) -> PlanHandle: ...
    def replace_plan(
        self,
        plan: PlanHandle,
        parts: Sequence[tuple[SparseMetadata, Sequence[tuple[str, int]], RelaySchedule, int, int]],
        stream: int,
    ) -> None: ...
    def reserve(self, window_bytes: int, num_slots: int, stream: int) -> None: ...
    def dispatch(
        self,
        plan: PlanHandle,
        tensors: Sequence[tuple[int, str, int, int, int]],
        stream: int,
        of_dispatch: int,
    ) -> Any: ...
    def kv_gradient(
        self,
        plan: PlanHandle,
        gradients: Sequence[tuple[int, str, int, int, int]],
        sums: Sequence[tuple[int, str, int, int, int]],
        stream: int,
        of_dispatch: int,
    ) -> None: ...
    def gradient_inputs(self, plan: PlanHandle, stream: int) -> Any: ...
    def synchronize(self, stream: int) -> None: ...
    def close(self) -> None: ...
    @property
    def window_bytes(self) -> int: ...
    @property
    def last_dispatch(self) -> int: ...

class EPConfig:
    pass

class EPDispatchOptions:
    pass

class ExpertDispatch:
    def combine(
        self,
        outputs: Sequence[NDArray[Any]],
        biases: Sequence[Sequence[NDArray[Any]]],
        local_combine: bool,
        weighted: bool,
    ) -> list[Any]: ...

ep_row_names: tuple[Any, ...]

payload_formats: tuple[Any, ...]

def ep_payload(payload: str, argument: str, hidden: int) -> dict[str, Any]: ...
def ep_config(
    max_tokens: int,
    hidden: int,
    topk: int,
    num_experts: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    token_dtype: str,
    weight_dtype: str,
) -> EPConfig: ...
def ep_dispatch_options(
    config: EPConfig,
    dropped_id: int | None,
    rows: str,
    expert_alignment: int,
    payload: str,
    spare_experts: int = 0,
    limit: float = 1.0,
    min_rows: int = 0,
) -> EPDispatchOptions: ...
def simulate_expert_dispatch(
    config: EPConfig,
    options: EPDispatchOptions,
    tokens: Sequence[NDArray[Any]],
    token_dtype: str,
    ids: Sequence[NDArray[Any]],
    weights: Sequence[NDArray[Any]],
    scales: Sequence[NDArray[Any]],
    positions: NDArray[Any] | None,
    present: Sequence[int],
) -> tuple[Any, ...]: ...
def grown_output_rows(rows: int, largest: int) -> int: ...
def quantize_rows(rows: NDArray[Any], dtype: str, format: str) -> tuple[Any, ...]: ...

class ExpertCostOptions:
    pass

def expert_cost_options(
    nvlink_bytes_per_second: float,
    network_bytes_per_second: float,
    block_bytes_per_second: float,
    num_sms: int,
    path: str,
    message_seconds: float = 4e-07,
    phase_seconds: float = 1.1e-05,
    network_message_seconds: float = 3e-06,
    network_post_seconds: float = 3e-07,
    path_bytes_per_second: float = 0.0,
) -> ExpertCostOptions: ...
def predict_experts(
    config: EPConfig,
    dispatch: EPDispatchOptions,
    ids: Sequence[NDArray[Any]],
    options: ExpertCostOptions,
) -> list[Any]: ...
def price_copies(
    config: EPConfig,
    dispatch: EPDispatchOptions,
    ids: Sequence[NDArray[Any]],
    calls: ExpertCostOptions,
    intermediate: int,
    gemm_flops_per_second: float,
) -> dict[str, Any]: ...
def break_even_rows(
    config: EPConfig,
    gemm_flops_per_second: float,
    link_bytes_per_second: float,
    weights: float,
    gradients: float,
    gemm: float,
) -> int: ...

class ExpertSummary:
    @property
    def row_bytes(self) -> int: ...
    def figures(self) -> dict[str, Any]: ...
    def placement(self) -> Any: ...
    def limit_seconds(self, nvlink: float, network: float) -> float: ...
    def explain(self, nvlink: float, network: float) -> list[str]: ...
    def text(self, nvlink: float, network: float) -> str: ...

def summarize_experts(
    config: EPConfig, options: EPDispatchOptions, ids: Sequence[NDArray[Any]]
) -> ExpertSummary: ...
def plan_expert_placement(
    loads: NDArray[Any],
    present: Sequence[int],
    num_ranks: int,
    slots_per_rank: int,
    num_nodes: int,
    num_groups: int,
    max_moves: int,
) -> dict[str, Any]: ...

class EvenExperts:
    @property
    def slots(self) -> Any: ...
    @property
    def quotas(self) -> Any: ...
    @property
    def local_rows(self) -> Any: ...
    @property
    def first_row(self) -> Any: ...
    @property
    def weights_out(self) -> Any: ...
    @property
    def weights_in(self) -> Any: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def mean_rows(self) -> float: ...
    @property
    def bound(self) -> int: ...

def slot_ids(
    slots: numpy.typing.NDArray[Any],
    quotas: numpy.typing.NDArray[Any],
    local_rows: numpy.typing.NDArray[Any],
    first_row: numpy.typing.NDArray[Any],
    rows: numpy.typing.NDArray[Any],
    ids: numpy.typing.NDArray[Any],
    rank: int,
) -> Any: ...
def even_experts(
    rows: numpy.typing.NDArray[Any],
    spare_experts: int,
    present: Sequence[int],
    min_rows: int,
    limit: float,
    alignment: int,
    num_nodes: int,
) -> EvenExperts: ...
def simulate_expert_copies(
    slots: numpy.typing.NDArray[Any], num_experts: int, home: Sequence[NDArray[Any]], row_bytes: int
) -> list[Any]: ...
def simulate_expert_copy_gradients(
    slots: numpy.typing.NDArray[Any],
    num_experts: int,
    home: Sequence[NDArray[Any]],
    copies: Sequence[NDArray[Any]],
    dtype: str,
    sum_dtype: str,
) -> list[Any]: ...

class EPLayout:
    @property
    def num_tokens(self) -> int: ...
    @property
    def number(self) -> int: ...
    def num_recv_rows(self) -> int: ...
    def table(self, name: str, stream: int) -> Any: ...

class LayerOptions:
    pass

def layer_options(
    dispatch: EPDispatchOptions,
    num_sm: int,
    enable_local_combine: bool,
    capacity: int,
    fixed_rows: int,
    max_per_expert: int,
) -> LayerOptions: ...

class ExpertLayer:
    def __init__(self, arg0: World, arg1: EPConfig, arg2: LayerOptions, /) -> None: ...
    def dispatch(
        self,
        tokens: tuple[int, str, Sequence[int]],
        ids: tuple[int, str, Sequence[int]] | None,
        weights: tuple[int, str, Sequence[int]] | None,
        scales: tuple[int, str, Sequence[int]] | None,
        positions: tuple[int, str, Sequence[int]] | None,
        layout: EPLayout | None,
        stream: int,
        needs_gradients: bool,
        weights_need_gradients: bool,
        of_backward: bool,
        origin: int,
        present: EPLayout | None,
    ) -> tuple[Any, ...]: ...
    def combine(
        self,
        rows: tuple[int, str, Sequence[int]],
        layout: EPLayout,
        output: tuple[int, str, Sequence[int]],
        weighted: bool,
        biases: Sequence[tuple[int, str, Sequence[int]]],
        stream: int,
        needs_gradients: bool,
        of_backward: bool,
        of_companion: bool,
    ) -> None: ...
    def weigh_gradients(
        self,
        gradients: tuple[int, str, Sequence[int]],
        weights: tuple[int, str, Sequence[int]] | None,
        rows: tuple[int, str, Sequence[int]] | None,
        layout: EPLayout,
        row_gradients: tuple[int, str, Sequence[int]] | None,
        weight_gradients: tuple[int, str, Sequence[int]] | None,
        stream: int,
    ) -> None: ...
    def copy_rows(
        self,
        rows: tuple[int, str, Sequence[int]],
        output: tuple[int, str, Sequence[int]],
        layout: EPLayout,
        stream: int,
    ) -> None: ...
    def combine_needs_gradients(
        self, layout: EPLayout, mine: bool, asks: bool, stream: int
    ) -> bool: ...
    def combine_input(self, rows: int, stream: int) -> Any: ...
    def barrier(self, stream: int, intra_node_only: bool) -> None: ...
    def synchronize(self, stream: int) -> None: ...
    def await_calls(self, stream: int) -> None: ...
    def take_overflow(self) -> int: ...
    def check_overflow(self) -> None: ...
    def finalize(self) -> None: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def output_rows(self) -> int: ...

class ExpertContext:
    def __init__(self, arg0: World, arg1: EPConfig, arg2: int, /) -> None: ...
    def reallocate(self, rows: int) -> tuple[Any, ...]: ...
    def finalize(self) -> None: ...
    @property
    def capacity(self) -> int: ...

class ExpertBarrier:
    def __init__(self, arg0: World, arg1: bool, /) -> None: ...
    def barrier_all(self) -> None: ...
    def finalize(self) -> None: ...

class CopyExchange:
    def __init__(self, arg: World, /) -> None: ...
    def fetch_weights(
        self,
        slots: numpy.typing.NDArray[Any],
        num_experts: int,
        parts: Sequence[tuple[int, str]],
        home: Sequence[int],
        copies: Sequence[int],
        owner: int,
    ) -> None: ...
    def add_gradients(
        self,
        slots: numpy.typing.NDArray[Any],
        num_experts: int,
        parts: Sequence[tuple[int, str]],
        home: Sequence[int],
        copies: Sequence[int],
        owner: int,
    ) -> None: ...
    def exchange_versions(self, mine: int, owner: int) -> list[int]: ...
    def finalize(self) -> None: ...

class CopyStore:
    def __init__(self, world: World, size_bytes: int, spare_experts: int) -> None: ...
    def fetch_weights(
        self,
        tables: tuple[int, int],
        sizes: tuple[int, int],
        parts: Sequence[tuple[int, str]],
        home: Sequence[int],
        copies: Sequence[int],
        held: tuple[int, int, bool],
        stream: int,
    ) -> None: ...
    def add_gradients(
        self,
        tables: tuple[int, int],
        sizes: tuple[int, int],
        parts: Sequence[tuple[int, str]],
        home: Sequence[int],
        copies: Sequence[int],
        held: tuple[int, int, bool],
        stream: int,
    ) -> None: ...
    def bytes(self, first: int, count: int) -> Any: ...
    def finalize(self) -> None: ...
