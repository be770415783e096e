// A first walk: three ranks, a few short sequences, every step printed.
//
//   lengths -> dispatch -> metadata -> print -> forward -> reverse -> check -> debugging
//
// Ends with 0 when everything came back as it left, else with 1.

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/core/error.h"
#include "waybill/core/host_tensor.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/generators.h"
#include "waybill/simulate/check.h"
#include "waybill/simulate/orchestrate.h"

namespace {

using namespace waybill;

constexpr std::int64_t world_size = 3;
constexpr std::int64_t rows_per_rank = 12;
constexpr std::int64_t hidden = 4;  // elements of a row

int num_failures = 0;

void title(std::string_view text) { std::cout << "\n== " << text << "\n"; }

void check(std::string_view what, bool ok) {
  std::cout << (ok ? "  ok      " : "  FAILED  ") << what << "\n";
  num_failures += ok ? 0 : 1;
}

/// Rows that say who they are: rank * 100 + row, in every element.
HostTensor numbered_rows() {
  HostTensor tensor(DType::float32, {world_size, rows_per_rank, hidden});
  const auto values = tensor.as<float>();
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i) / hidden;
    values[i] = static_cast<float>(row / rows_per_rank * 100 + row % rows_per_rank);
  }
  return tensor;
}

/// The first element of every row, rank by rank.
void print_rows(const HostTensor& tensor) {
  const std::int64_t rows = tensor.shape()[1];
  for (std::int64_t w = 0; w < tensor.shape()[0]; ++w) {
    std::cout << "  rank " << w << ":";
    for (std::int64_t r = 0; r < rows; ++r) {
      std::cout << " " << tensor.as<float>()[static_cast<std::size_t>((w * rows + r) * hidden)];
    }
    std::cout << "\n";
  }
}

/// Every sequence goes to the next rank, but the first of each rank stays.
IndexArray choose_destinations(const IndexArray& seq_len) {
  IndexArray dispatch(seq_len.shape());
  const std::int64_t columns = seq_len.dim(1);
  for (std::int64_t i = 0; i < dispatch.size(); ++i) {
    const std::int64_t rank = i / columns;
    dispatch.i64()[static_cast<std::size_t>(i)] = i % columns == 0 ? rank : (rank + 1) % world_size;
  }
  return dispatch;
}

/// Most rows that any rank receives: a buffer of so many is enough for all.
std::int64_t most_rows(const Metadata& metadata) {
  return std::ranges::max(metadata.num_total_recv_tokens);
}

void walk_forward_and_back(const Metadata& fwd, const Metadata& rev) {
  title("Forward: from where the rows live to where attention runs");
  const HostTensor q = numbered_rows();
  std::cout << "Each row holds rank * 100 + row. Before:\n";
  print_rows(q);
  HostTensor attention(DType::float32, {world_size, most_rows(fwd), hidden});
  orchestrate_simulate(q.view(), attention.view(), fwd);
  std::cout << "After (rows past a rank's own stay 0):\n";
  print_rows(attention);

  title("Reverse: back home");
  HostTensor back(DType::float32, {world_size, rows_per_rank, hidden});
  orchestrate_simulate(attention.view(), back.view(), rev);
  print_rows(back);
  check("every row is back where it left, bit for bit",
        std::ranges::equal(back.bytes(), q.bytes()));
}

void show_one_rank(const Metadata& fwd) {
  title("The slice of rank 1: what that rank needs to know");
  const Metadata slice = fwd.get_slice(Rank{1});
  std::cout << slice;
  std::cout << "As tables for a device: dst_rank is " << slice.normalize_dtype().dst_rank.dtype()
            << ", dst_offset is " << slice.normalize_dtype().dst_offset.dtype() << ".\n";
}

/// What a mistake looks like.
void debug_a_mistake(const Metadata& fwd) {
  title("Debugging: an offset that points past the end");
  Metadata broken = fwd;
  broken.dst_offset.i64()[0] += rows_per_rank;
  const HostTensor q = numbered_rows();
  HostTensor attention(DType::float32, {world_size, most_rows(fwd), hidden});
  std::string message;
  try {
    orchestrate_simulate(q.view(), attention.view(), broken);
  } catch (const InvalidArgument& error) {
    message = error.what();
  }
  std::cout << "  " << message << "\n";
  check("the simulation refuses it and names the place", !message.empty());
  const auto bytes = attention.bytes();
  check("and has written nothing",
        std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{0}; }));
}

void run() {
  title("Lengths: three random sequences a rank, 12 tokens in all");
  const IndexArray seq_len = gen_seq_lens(world_size, 3, rows_per_rank, /*seed=*/7);
  std::cout << "  " << to_string(seq_len) << "\n";

  title("Dispatch: the rank that attends to each sequence");
  const IndexArray dispatch = choose_destinations(seq_len);
  std::cout << "  " << to_string(dispatch) << "\n";

  title("Metadata: which rows go where");
  const auto [fwd, rev, intermediates] = compute_metadata(seq_len, dispatch, true);
  std::cout << "Forward, a line per sequence (row ranges are half open):\n" << fwd;
  std::cout << "Reverse, sent by the ranks that attended:\n" << rev;
  std::cout << "Sequences that each rank receives: " << to_string(intermediates->num_received_seqs)
            << "\n";

  walk_forward_and_back(fwd, rev);
  show_one_rank(fwd);
  debug_a_mistake(fwd);

  title("The same with keys and values: a random plan with shards, checked in one call");
  const QkvDispatchTest test = test_qkv_dispatch(
      {.world_size = world_size, .total_seq_len = 64, .num_seqs = 3, .max_cp_degree = 2});
  std::cout << "  compared " << test.elements_compared << " numbers\n";
  for (const Finding& finding : test.findings) std::cout << "  " << finding << "\n";
  check("Q, K and V arrive and come back", test.passed());
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
  std::cout << (num_failures == 0 ? "\nAll is well.\n" : "\nSomething is wrong.\n");
  return num_failures == 0 ? 0 : 1;
}
