// The same program on ranks of any kind. It reads what the launcher says, sends the rows of a plan
// to where attention would run, back again, and checks every row.
//
//   launch                                                      4 threads of one process
//   torchrun --nproc-per-node 4 --no-python launch              4 processes
//   WAYBILL_RENDEZVOUS=file://$HOME/run-1 mpirun -n 4 launch    the same; srun -n 4 too
//
// With --gpu ranks have GPUs; those of several hosts reach each other over NCCL, with --nccl those
// of several nodes on one host as well; with --nvshmem over NVSHMEM. All need -DWAYBILL_CUDA=ON.
// --threads N says how many threads there are without a launcher, --timeout S how long a rank may
// be late, --rounds N how often rows go there and back. Ends with 0 when all rows are right, else
// with 1.

#include <charconv>
#include <cstdint>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "rank_memory.h"
#include "waybill/core/error.h"
#include "waybill/core/host_tensor.h"
#include "waybill/core/wait.h"
#include "waybill/planner/planner.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/runtime/sequence_dispatcher.h"
#include "waybill/runtime/world.h"
#include "waybill/transport/bootstrap.h"
#ifdef WAYBILL_EXAMPLE_CUDA
#include "waybill/cuda/gpu_world.h"
#endif

namespace {

using namespace waybill;

constexpr std::int64_t hidden = 16;  // elements of a row
constexpr std::int64_t rows_per_rank = 4096;

struct Options {
  bool gpu = false;
  bool nvshmem = false;
  bool nccl = false;
  std::int32_t threads = 4;
  std::int64_t rounds = 1;
  double timeout_s = 30;

  [[nodiscard]] bool on_gpus() const { return gpu || nvshmem || nccl; }
};

/// What row `row` of rank `rank` holds, in every element.
std::int64_t number_of(std::int32_t rank, std::int64_t row) { return rank * 1'000'000 + row; }

HostTensor numbered_rows(Rank rank, std::int64_t rows) {
  HostTensor tensor(DType::int64, {rows, hidden});
  const auto values = tensor.as<std::int64_t>();
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = number_of(to_int(rank), static_cast<std::int64_t>(i) / hidden);
  }
  return tensor;
}

bool holds(const HostTensor& tensor, std::int64_t row, std::int64_t number) {
  const auto values = tensor.as<const std::int64_t>();
  for (std::int64_t k = 0; k < hidden; ++k) {
    if (values[static_cast<std::size_t>(row * hidden + k)] != number) return false;
  }
  return true;
}

/// Compares every row that `metadata` sends to this rank; returns how many there are.
std::int64_t check_arrived(const SparseMetadata& metadata, Rank me, const HostTensor& arrived) {
  std::int64_t num_rows = 0;
  for (std::int32_t from = 0; from < metadata.world_size; ++from) {
    std::int64_t first_row = 0;
    for (auto entry = metadata.rank_offsets[static_cast<std::size_t>(from)];
         entry < metadata.rank_offsets[static_cast<std::size_t>(from) + 1]; ++entry) {
      const std::int64_t length = metadata.seq_len[static_cast<std::size_t>(entry)];
      for (auto c = metadata.destination_begin(entry); c < metadata.destination_end(entry); ++c) {
        if (metadata.dst_rank[static_cast<std::size_t>(c)] != to_int(me)) continue;
        const std::int64_t offset = metadata.dst_offset[static_cast<std::size_t>(c)];
        for (std::int64_t i = 0; i < length; ++i, ++num_rows) {
          if (holds(arrived, offset + i, number_of(from, first_row + i))) continue;
          throw InternalError(
              concat("row ", offset + i, " is not row ", first_row + i, " of rank ", from));
        }
      }
      first_row += length;
    }
  }
  return num_rows;
}

void check_home(const HostTensor& rows, Rank me) {
  for (std::int64_t row = 0; row < rows.shape()[0]; ++row) {
    if (holds(rows, row, number_of(to_int(me), row))) continue;
    throw InternalError(concat("row ", row, " of Q did not come home"));
  }
}

/// One long document, which all ranks have to share, and short ones.
QkvRouting example_routing(std::int32_t world_size) {
  std::vector<std::int64_t> lengths{rows_per_rank * world_size / 2};
  for (std::int64_t left = rows_per_rank * world_size - lengths[0]; left > 0;) {
    lengths.push_back(std::min<std::int64_t>(left, 100 + 37 * std::ssize(lengths)));
    left -= lengths.back();
  }
  PlannerOptions options;
  options.world_size = world_size;
  options.tokens_per_rank = rows_per_rank;
  return compute_qkv_routing(plan_attention(lengths, options).plan);
}

/// What every rank does; says in one entry what it has seen.
std::string move_and_check(World& world, const Options& options) {
  std::string seen;
  const QkvRouting routing = example_routing(world.world_size());
  const TensorFormat format{DType::int64, hidden};
  const HostTensor rows = numbered_rows(world.rank(), rows_per_rank);
  RankMemory memory(options.on_gpus());
  const ConstTensorView input = memory.place(rows);
  const Stream stream = memory.stream();

  SequenceDispatcher dispatcher(world);
  const std::vector<SequencePart> qkv{{&routing.fwd_q, {format}}, {&routing.fwd_kv, {format}}};
  const std::vector<SequencePart> home{{&routing.rev_q, {format}}};
  const PlanHandle forward = dispatcher.plan_dispatch(qkv, stream);
  const PlanHandle reverse = dispatcher.plan_dispatch(home, stream);

  for (std::int64_t round = 0; round < options.rounds; ++round) {
    const auto arrived = dispatcher.dispatch(forward, std::vector{input, input}, stream);
    dispatcher.synchronize(stream);
    const std::int64_t q = check_arrived(routing.fwd_q, world.rank(), memory.fetch(arrived[0]));
    const std::int64_t kv = check_arrived(routing.fwd_kv, world.rank(), memory.fetch(arrived[1]));

    const auto back =
        dispatcher.dispatch(reverse, std::vector<ConstTensorView>{arrived[0]}, stream);
    dispatcher.synchronize(stream);
    const HostTensor came_home = memory.fetch(back[0]);
    check_home(came_home, world.rank());
    seen = concat("rank ", world.rank(), " of ", world.world_size(), ": ", q, " rows of Q and ", kv,
                  " of K and V arrived, ", came_home.shape()[0], " of Q came home\n");
    if (round == 0 && options.rounds > 1) std::cout << "first round: " << seen << std::flush;
  }
  world.barrier();
  dispatcher.close();
  return seen;
}

[[noreturn, maybe_unused]] void no_cuda() {
  throw Unsupported("launch: this build has no GPU worlds, expected -DWAYBILL_CUDA=ON");
}

void run_threads(const Options& options) {
  const auto body = [&](World& world) { std::cout << move_and_check(world, options); };
  const ThreadWorldOptions world_options{.ranks_per_node = 0, .timeout_s = options.timeout_s};
  if (!options.on_gpus()) {
    return run_thread_world(options.threads, body, world_options);
  }
#ifdef WAYBILL_EXAMPLE_CUDA
  run_gpu_thread_world(options.threads, body, world_options);
#else
  no_cuda();
#endif
}

/// Which world the processes make that a launcher started.
World make_world(std::shared_ptr<Bootstrap> bootstrap,
                 [[maybe_unused]] const LaunchEnvironment& environment, const Options& options) {
  if (!options.on_gpus()) return make_process_world(std::move(bootstrap));
#ifdef WAYBILL_EXAMPLE_CUDA
  if (num_gpus() == 0) throw Unsupported("launch: there is no GPU");
  const int device = environment.local_rank % num_gpus();
  if (cudaSetDevice(device) != cudaSuccess) throw CudaError(concat("no device ", device));
  if (options.nvshmem) {
    return make_nvshmem_world(std::move(bootstrap), device, environment.ranks_per_node);
  }
  return make_gpu_process_world(std::move(bootstrap), device, environment.ranks_per_node,
                                options.nccl ? NetworkBackend::nccl : NetworkBackend::automatic);
#else
  no_cuda();
#endif
}

template <class Number>
Number number_after(std::string_view name, const char* text) {
  Number value{};
  const std::string_view all = text != nullptr ? text : "";
  const auto [end, error] = std::from_chars(all.data(), all.data() + all.size(), value);
  require(error == std::errc{} && end == all.data() + all.size() && value > 0, "launch: ", name,
          " = \"", all, "\", expected a number > 0");
  return value;
}

Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--gpu") {
      options.gpu = true;
    } else if (word == "--nvshmem") {
      options.nvshmem = true;
    } else if (word == "--nccl") {
      options.nccl = true;
    } else if (word == "--threads") {
      options.threads = number_after<std::int32_t>(word, argv[++i]);
    } else if (word == "--rounds") {
      options.rounds = number_after<std::int64_t>(word, argv[++i]);
    } else if (word == "--timeout") {
      options.timeout_s = number_after<double>(word, argv[++i]);
    } else {
      throw_invalid("launch: ", word,
                    ", expected --gpu, --nccl, --nvshmem, --threads N, --rounds N or --timeout S");
    }
  }
  return options;
}

void run(int argc, char** argv) {
  const Options options = read_options(argc, argv);
  const LaunchEnvironment environment = read_launch_environment();
  if (environment.launcher == "none") return run_threads(options);
  const std::shared_ptr<Bootstrap> bootstrap =
      make_environment_bootstrap(environment, options.timeout_s);
  World world =
      fail_on_error(*bootstrap, [&] { return make_world(bootstrap, environment, options); });
  std::cout << move_and_check(world, options);
}

}  // namespace

int main(int argc, char** argv) {
  const EndWaitsOnSigint guard;  // Ctrl-C ends a wait for other ranks; twice ends the program
  try {
    run(argc, argv);
  } catch (const Interrupted& error) {
    std::cerr << concat("error: ", error.what(), "\n");
    return 130;
  } catch (const std::exception& error) {
    std::cerr << concat("error: ", error.what(), "\n");
    return 1;
  }
  return 0;
}
