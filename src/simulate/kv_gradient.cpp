#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <vector>

#include "core/checks.h"
#include "core/number.h"
#include "core/parallel_for.h"
#include "views.h"
#include "waybill/core/error.h"
#include "waybill/simulate/orchestrate.h"

namespace waybill {
namespace {

constexpr const char* in_sum_kv_copies = "sum_kv_copies";
constexpr std::int64_t block_elements = 512;  // elements of a row that are summed at a time
constexpr std::int64_t work_item_elements = 65536;

/// The copies of which a shard's rows are the sum.
struct Shard {
  std::int64_t end_row;              ///< past its last row
  std::vector<std::int64_t> copies;  ///< used, ascending
};

template <class T>
T read(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <class T>
void write(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof(T));
}

/// Sums one row. Where the only copy goes to its own dtype, the bits are moved as they are.
template <class In, class Out>
void sum_row(const ConstTensorView& planes, const TensorView& output, const Shard& shard,
             std::int64_t row) {
  using Sum = typename In::Sum;
  using InStored = typename In::Stored;
  using OutStored = typename Out::Stored;
  constexpr auto in_bytes = static_cast<std::int64_t>(sizeof(InStored));
  constexpr auto out_bytes = static_cast<std::int64_t>(sizeof(OutStored));
  const std::int64_t num_rows = output.shape[0];
  const std::int64_t hidden = output.shape[1];
  const std::int64_t from_step = detail::step_of(planes, 1) * in_bytes;
  const std::int64_t to_step = detail::step_of(output, 1) * out_bytes;
  std::byte* to = output.data + row * detail::step_of(output, 0) * out_bytes;
  const std::int64_t plane_step = detail::step_of(planes, 0) * in_bytes;
  const auto row_of_copy = [&](std::int64_t copy) {
    return planes.data + (copy * num_rows + row) * plane_step;
  };
  if (std::is_same_v<In, Out> && shard.copies.size() == 1) {
    const std::byte* from = row_of_copy(shard.copies[0]);
    for (std::int64_t i = 0; i < hidden; ++i) {
      write(to + i * to_step, read<InStored>(from + i * from_step));
    }
    return;
  }
  std::array<Sum, block_elements> sums;
  for (std::int64_t first = 0; first < hidden; first += block_elements) {
    const std::int64_t count = std::min(block_elements, hidden - first);
    if (shard.copies.empty()) std::fill_n(sums.begin(), count, Sum{0});
    for (std::size_t k = 0; k < shard.copies.size(); ++k) {
      const std::byte* from = row_of_copy(shard.copies[k]) + first * from_step;
      for (std::int64_t i = 0; i < count; ++i) {
        const Sum value = In::load(read<InStored>(from + i * from_step));
        Sum& sum = sums[i];
        sum = k == 0 ? value : sum + value;
      }
    }
    for (std::int64_t i = 0; i < count; ++i) {
      write(to + (first + i) * to_step, Out::round(sums[i]));
    }
  }
}

template <class In, class Out>
void sum_rows(const ConstTensorView& planes, const TensorView& output,
              const std::vector<Shard>& shards, int num_threads) {
  const std::int64_t grain =
      std::max<std::int64_t>(1, work_item_elements / std::max<std::int64_t>(1, output.shape[1]));
  parallel_for(output.shape[0], grain, num_threads, [&](std::int64_t begin, std::int64_t end) {
    auto shard = std::ranges::upper_bound(shards, begin, {}, &Shard::end_row);
    for (std::int64_t row = begin; row < end; ++row) {
      while (row >= shard->end_row) ++shard;
      sum_row<In, Out>(planes, output, *shard, row);
    }
  });
}

std::vector<Shard> shards_of(const IndexArray& mask, const IndexArray& lens) {
  require(lens.ndim() == 1, in_sum_kv_copies, ": recv_seq_lens has shape ", to_string(lens.shape()),
          ", expected [S]");
  require(mask.ndim() == 2 && mask.dim(0) == lens.dim(0), in_sum_kv_copies,
          ": seq_recv_mask has shape ", to_string(mask.shape()), ", expected [", lens.dim(0),
          ", C]");
  const Int64View used(mask);
  const Int64View rows(lens);
  const std::int64_t copies = mask.dim(1);
  std::vector<Shard> shards;
  std::int64_t end = 0;
  for (std::int64_t s = 0; s < lens.dim(0); ++s) {
    require(rows[s] >= 0 && !__builtin_add_overflow(end, rows[s], &end), in_sum_kv_copies,
            ": recv_seq_lens[", s, "] = ", rows[s], ", expected >= 0 and a sum below 2^63");
    Shard shard{end, {}};
    for (std::int64_t c = 0; c < copies; ++c) {
      const std::int64_t flag = used[s * copies + c];
      require(flag == 0 || flag == 1, in_sum_kv_copies, ": seq_recv_mask[", s, ", ", c,
              "] = ", flag, ", expected 0 or 1");
      if (flag == 1) shard.copies.push_back(c);
    }
    shards.push_back(std::move(shard));
  }
  return shards;
}

}  // namespace

void sum_kv_copies(const ConstTensorView& planes, const TensorView& output,
                   const IndexArray& seq_recv_mask, const IndexArray& recv_seq_lens,
                   int num_threads) {
  detail::check_at_least(in_sum_kv_copies, "num_threads", num_threads, 0);
  detail::check_view(in_sum_kv_copies, "planes", planes, 2);
  detail::check_view(in_sum_kv_copies, "output", output, 2);
  const std::vector<Shard> shards = shards_of(seq_recv_mask, recv_seq_lens);
  const std::int64_t num_rows = shards.empty() ? 0 : shards.back().end_row;
  const std::int64_t copies = seq_recv_mask.dim(1);
  require(output.shape[0] == num_rows, in_sum_kv_copies, ": output has shape ",
          to_string(output.shape), ", expected ", num_rows, " rows, the sum of recv_seq_lens");
  std::int64_t plane_rows = 0;
  require(!__builtin_mul_overflow(copies, num_rows, &plane_rows) && planes.shape[0] == plane_rows &&
              planes.shape[1] == output.shape[1],
          in_sum_kv_copies, ": planes has shape ", to_string(planes.shape), ", expected [", copies,
          " * ", num_rows, ", ", output.shape[1], "]");
  detail::check_memory(in_sum_kv_copies, {&planes, 1}, {&output, 1});

  bool is_known = false;
  detail::for_number(planes.dtype, [&](auto number) {
    using In = decltype(number);
    const auto sum_to = [&](auto out) {
      if (output.dtype != out.dtype) return;
      is_known = true;
      sum_rows<In, decltype(out)>(planes, output, shards, num_threads);
    };
    sum_to(In{});
    if constexpr (sizeof(typename In::Stored) == 2) sum_to(detail::Float32{});
  });
  require(is_known, in_sum_kv_copies, ": planes of ", planes.dtype, " and output of ", output.dtype,
          ", expected float32, float64, bfloat16 or float16, and the same for output or float32 "
          "for planes of bfloat16 or float16");
}

void sum_kv_copies(const ConstTensorView& planes, const TensorView& output, const Metadata& rev_kv,
                   Rank rank, int num_threads) {
  require(rev_kv.seq_recv_mask && rev_kv.recv_seq_lens, in_sum_kv_copies,
          ": rev_kv has no seq_recv_mask or recv_seq_lens, expected the reverse of a dispatch with "
          "copies");
  if (rev_kv.is_slice()) {
    sum_kv_copies(planes, output, *rev_kv.seq_recv_mask, *rev_kv.recv_seq_lens, num_threads);
    return;
  }
  const IndexArray& mask = *rev_kv.seq_recv_mask;
  const IndexArray& lens = *rev_kv.recv_seq_lens;
  require(mask.ndim() == 3 && lens.ndim() == 2 && mask.dim(0) == lens.dim(0), in_sum_kv_copies,
          ": seq_recv_mask has shape ", to_string(mask.shape()), " and recv_seq_lens ",
          to_string(lens.shape()), ", expected [W, S, C] and [W, S]");
  const std::int64_t r = to_int(rank);
  detail::check_range(in_sum_kv_copies, "rank", r, 0, lens.dim(0) - 1);
  sum_kv_copies(planes, output, mask.row(r), lens.row(r), num_threads);
}

}  // namespace waybill
