#include "../device/arrive_and_wait.cuh"
#include "../device/bulk.cuh"
#include "batch.cuh"

namespace waybill::cuda {
namespace {

constexpr int warps = 6;
constexpr int stages = 4;
constexpr int min_batch = 4;  // descriptors that a warp fetches at a time
constexpr int max_batch = 6;
constexpr int ring = 32;
constexpr int sms_of_links = 8;  // as many as fill the links

/// A chunk with its addresses, as the warp's loops read it.
struct Descriptor {
  RowChunk chunk;
  std::uint64_t addresses[max_addresses_sent];
  std::int32_t batch;  ///< in plans with batches
};

struct WarpMemory {
  Descriptor ring_[ring];
  std::uint64_t loaded[stages];  ///< barriers
};

struct BlockMemory {
  alignas(128) std::byte stage[warps][stages][max_bulk_chunk_bytes];
  WarpMemory warp[warps];
};

/// Blocks that begin with the chunks of the links; the others begin with those that stay. Where 8
/// can fill the links for long and the rest is enough for what stays, 8; else in proportion.
__device__ int blocks_for_links(int wire, int stay, int blocks) {
  if (stay == 0 || wire == 0) return stay == 0 ? blocks : 0;
  const float ratio = static_cast<float>(stay) / static_cast<float>(wire);
  const auto share = static_cast<int>(ceilf(static_cast<float>(blocks) / (1 + ratio)));
  constexpr int long_time = 64 * sms_of_links * warps;
  if (share > sms_of_links && blocks <= 4 * sms_of_links && wire >= long_time &&
      static_cast<float>(blocks - sms_of_links) >= sms_of_links * ratio) {
    return sms_of_links;
  }
  return share < blocks || blocks == 1 ? share : blocks - 1;
}

/// Chunks that warps take from, in batches: the first by a warp's number, more by ticket.
struct Queue {
  int first;  ///< chunk
  int count;
  int batch;
  int given;  ///< chunks that warps have by number
  unsigned long long* taken;

  __device__ Queue(int first_chunk, int num_chunks, int num_warps, int given_warps,
                   unsigned long long* counter)
      : first(first_chunk), count(num_chunks), taken(counter) {
    // Few are given by number alone, in equal shares; more in batches that keep a warp busy while
    // the next one comes, and small enough that all warps end together.
    const int each = num_chunks / (num_warps * 16);
    batch = each < min_batch ? min_batch : each > max_batch ? max_batch : each;
    if (given_warps > 0 && num_chunks < given_warps * batch) {
      batch = (num_chunks + given_warps - 1) / given_warps;
    }
    given = given_warps * batch;
  }
  [[nodiscard]] __device__ bool has_tickets() const { return given < count; }
};

/// Gives a warp its chunks: those of the queue that its block begins with, then those of the other.
/// Each step of fetching a batch is asked for well before its result is needed, so that nobody
/// waits for memory.
template <bool Batched>
class Tickets {
 public:
  __device__ Tickets(const SequenceParams& p, WarpMemory& memory)
      : Tickets(p, memory, static_cast<int>(p.head->num_wire_chunks),
                static_cast<int>(p.head->num_chunks)) {}

  [[nodiscard]] __device__ const Descriptor& operator[](int i) const {
    return memory_.ring_[i % ring];
  }

  /// Chunks that are known so far; more() may add to them.
  [[nodiscard]] __device__ int known() const { return known_; }

  /// One step further, unless all is taken or the ring is full. `done`: chunks not needed any more.
  /// @return false when there will be no more
  __device__ bool more(int done) {
    if (step_ == Step::end) return false;
    if (known_ + max_batch - done > ring) return true;
    switch (step_) {
      case Step::chunks:
        fetch_chunks();
        break;
      case Step::addresses:
        fetch_addresses();
        break;
      default:
        keep();
    }
    return step_ != Step::end;
  }

 private:
  enum class Step : std::uint8_t { chunks, addresses, keep, end };

  __device__ Tickets(const SequenceParams& p, WarpMemory& memory, int wire, int all)
      : Tickets(p, memory, wire, all,
                blocks_for_links(wire, all - wire, static_cast<int>(gridDim.x))) {}

  __device__ Tickets(const SequenceParams& p, WarpMemory& memory, int wire, int all, int split)
      : p_(p),
        memory_(memory),
        lane_(static_cast<int>(threadIdx.x % 32)),
        here_(0, wire, static_cast<int>(gridDim.x) * warps, split * warps, p.arrive.state->taken),
        other_(wire, all - wire, static_cast<int>(gridDim.x) * warps,
               (static_cast<int>(gridDim.x) - split) * warps, p.arrive.state->taken + 1) {
    auto block = static_cast<int>(blockIdx.x);
    int blocks = split;
    if (block >= split) {
      swap_queues();
      block -= split;
      blocks = static_cast<int>(gridDim.x) - split;
    }
    begin_ = (block + static_cast<int>(threadIdx.x / 32) * blocks) * here_.batch;
    if (all == 0) step_ = Step::end;
  }

  __device__ void swap_queues() {
    const Queue queue = here_;
    here_ = other_;
    other_ = queue;
  }

  __device__ void ask() {
    if (!here_.has_tickets()) {  // all chunks were given by number
      next_queue();
      return;
    }
    if (lane_ == 0) {
      taken_ =
          static_cast<int>(atomicAdd(here_.taken, static_cast<unsigned long long>(here_.batch)));
    }
    begin_ = -1;
    step_ = Step::chunks;
  }

  __device__ void next_queue() {
    if (switched_) {
      step_ = Step::end;
      return;
    }
    switched_ = true;
    swap_queues();
    ask();
  }

  __device__ void fetch_chunks() {
    if (begin_ < 0) begin_ = here_.given + __shfl_sync(0xFFFFFFFFU, taken_, 0);
    if (begin_ >= here_.count) {
      next_queue();
      return;
    }
    size_ = here_.count - begin_ < here_.batch ? here_.count - begin_ : here_.batch;
    if (lane_ < size_) {
      const int number = here_.first + begin_ + lane_;
      next_ = p_.chunks[number];
      if constexpr (Batched) next_batch_ = p_.chunk_batches[number];
    }
    step_ = Step::addresses;
  }

  __device__ void fetch_addresses() {
    if (lane_ < size_) {
#pragma unroll
      for (int k = 0; k < max_addresses_sent; ++k) {
        if (k < next_.num_addresses) next_addresses_[k] = p_.addresses[next_.first_address + k];
      }
    }
    step_ = Step::keep;
  }

  __device__ void keep() {
    if (lane_ < size_) {
      Descriptor& to = memory_.ring_[(known_ + lane_) % ring];
      to.chunk = next_;
      if constexpr (Batched) to.batch = next_batch_;
#pragma unroll
      for (int k = 0; k < max_addresses_sent; ++k) {
        if (k < next_.num_addresses) to.addresses[k] = next_addresses_[k];
      }
    }
    __syncwarp();
    known_ += size_;
    ask();
  }

  const SequenceParams& p_;
  WarpMemory& memory_;
  const int lane_;
  Queue here_;
  Queue other_;
  bool switched_ = false;
  Step step_ = Step::chunks;
  int taken_ = 0;  ///< lane 0: the ticket asked for
  int begin_ = 0;  ///< the batch in its queue; -1: by ticket
  int size_ = 0;
  int known_ = 0;
  RowChunk next_;
  std::int32_t next_batch_ = 0;
  std::uint64_t next_addresses_[max_addresses_sent];
};

/// Moves the chunks of one warp through a ring of stages.
template <bool Batched>
class WarpWork {
 public:
  __device__ WarpWork(const SequenceParams& p, BlockMemory& memory, std::uint64_t epoch)
      : p_(p),
        epoch_(epoch),
        lane_(static_cast<int>(threadIdx.x % 32)),
        loaded_(memory.warp[threadIdx.x / 32].loaded),
        stage_(memory.stage[threadIdx.x / 32]),
        tickets_(p, memory.warp[threadIdx.x / 32]),
        arrived_(p, epoch) {
    if (lane_ == 0) {
      for (int s = 0; s < stages; ++s) barrier_init(&loaded_[s]);
      fence_barrier_init();
      fence_async_global();
    }
    __syncwarp();
  }

  __device__ void run() {
    int asked = 0;  // loads
    int i = 0;
    for (;; ++i) {
      const int done = Batched ? i - stages : i;  // descriptors that nobody needs any more
      while (tickets_.known() <= i && tickets_.more(done)) {
      }
      if (tickets_.known() <= i) break;
      if (asked == i) {  // no later chunk was known, or ready
        make_room(i);
        if constexpr (Batched) wait_chunk(i);
        load(asked++);
        while (asked < i + stages - 1 && can_load(asked)) load(asked++);
      }
      store(i);
      if constexpr (Batched) settle<stages - 1>(i);
      tickets_.more(done);
      if (asked >= i + stages || !can_load(asked)) continue;
      make_room(i + 1);
      do {
        load(asked++);
      } while (asked < i + stages && can_load(asked));
    }
    if constexpr (Batched) {
      settle<0>(i - 1);
      if (lane_ == 0) arrived_.flush();
    }
    if (lane_ == 0) bulk_wait_all();
    fence_async_global();
  }

 private:
  /// All stores but the last have left their stages.
  __device__ void make_room(int stored) {
    if (stored > 0 && lane_ == 0) bulk_wait_read_but_one();
    __syncwarp();
  }

  [[nodiscard]] __device__ bool can_load(int i) {
    if (i >= tickets_.known()) return false;
    if constexpr (!Batched) {
      return true;
    } else {
      const std::int32_t batch = tickets_[i].batch;
      if (batch == ready_) return true;
      if (!is_ready(p_, p_.batches[batch], epoch_)) return false;
      set_ready(batch);
      return true;
    }
  }

  /// Waits for what chunk i waits for; first it counts all that others wait for.
  __device__ void wait_chunk(int i) {
    if (can_load(i)) return;
    settle<0>(i - 1);
    if (lane_ == 0) arrived_.flush();
    __syncwarp();
    wait_batch(p_, p_.batches[tickets_[i].batch], epoch_);
    set_ready(tickets_[i].batch);
  }

  __device__ void set_ready(std::int32_t batch) {
    ready_ = batch;
    forwards_ = p_.batches[batch].kind == BatchKind::forward;
  }

  /// Counts the chunks that have arrived: all up to `stored` but the last `Groups`.
  template <int Groups>
  __device__ void settle(int stored) {
    if (lane_ == 0) bulk_wait_but<Groups>();
    for (; settled_ <= stored - Groups; ++settled_) {
      if (lane_ == 0) arrived_.add(tickets_[settled_].batch);
    }
  }

  /// Where the rows of a chunk are.
  [[nodiscard]] __device__ TensorParams source_of(const RowChunk& chunk) const {
    if (!Batched || !forwards_) return p_.inputs[chunk.tensor];
    return {p_.own_window + p_.head->window_offsets[chunk.tensor],
            p_.head->cuts[chunk.tensor].row_bytes};
  }

  __device__ void load(int i) {
    const RowChunk& chunk = tickets_[i].chunk;
    const TensorParams tensor = source_of(chunk);
    std::byte* const to = stage_[i % stages];
    std::uint64_t* const barrier = &loaded_[i % stages];
    const std::byte* const from = tensor.data + chunk.row * tensor.pitch_bytes + chunk.col_bytes;
    const auto bytes = static_cast<std::uint32_t>(chunk.rows * chunk.part_bytes);
    const bool one_piece = chunk.rows == 1 || tensor.pitch_bytes == chunk.part_bytes;
    if (lane_ == 0) {
      barrier_expect(barrier, bytes);
      if (one_piece) bulk_load_to_copy(to, from, bytes, barrier);
    }
    if (one_piece) return;
    __syncwarp();
    for (int row = lane_; row < chunk.rows; row += 32) {
      bulk_load_to_copy(to + row * chunk.part_bytes, from + row * tensor.pitch_bytes,
                        static_cast<std::uint32_t>(chunk.part_bytes), barrier);
    }
  }

  __device__ void store(int i) {
    const Descriptor& descriptor = tickets_[i];
    const auto bytes =
        static_cast<std::uint32_t>(descriptor.chunk.rows * descriptor.chunk.part_bytes);
    if (lane_ == 0) {
      barrier_wait(&loaded_[i % stages], static_cast<std::uint32_t>(i / stages % 2));
      for (int k = 0; k < descriptor.chunk.num_addresses; ++k) {
        bulk_store(place_of(p_, descriptor.addresses[k]), stage_[i % stages], bytes);
      }
      bulk_commit();
    }
    __syncwarp();
  }

  const SequenceParams& p_;
  const std::uint64_t epoch_;
  const int lane_;
  std::uint64_t* const loaded_;
  std::byte (*const stage_)[max_bulk_chunk_bytes];
  Tickets<Batched> tickets_;
  ArrivalCount arrived_;
  int settled_ = 0;          ///< chunks counted as arrived
  std::int32_t ready_ = -1;  ///< the last batch found ready
  bool forwards_ = false;    ///< it sends rows of the window
};

/// Compiled for every architecture, of use from sm_90 on.
template <bool Batched>
__global__ void __launch_bounds__(warps * 32, 1)
    dispatch_tma_kernel(const __grid_constant__ SequenceParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  const CallWords words = load_call_words(p.arrive.fingerprint);
  const std::uint64_t epoch = begin_call(p.arrive);
  if (Batched && blockIdx.x == 0 && threadIdx.x < 32) {
    send_call_words(p.arrive, epoch, words);
  }
  WarpWork<Batched>(p, *reinterpret_cast<BlockMemory*>(shared), epoch).run();
  if (!is_last_block(p.arrive) || threadIdx.x >= 32) return;
  arrive_and_wait_at_end(p.arrive, epoch, words, Batched);
}

}  // namespace

cudaError_t prepare_dispatch_tma() {
  for (const auto kernel : {dispatch_tma_kernel<false>, dispatch_tma_kernel<true>}) {
    const cudaError_t status = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(BlockMemory)));
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t launch_dispatch_tma(const SequenceParams& params, bool batched, int num_sms,
                                cudaStream_t stream) {
  const auto kernel = batched ? dispatch_tma_kernel<true> : dispatch_tma_kernel<false>;
  kernel<<<static_cast<unsigned>(num_sms), warps * 32, sizeof(BlockMemory), stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
