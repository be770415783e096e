// The page of DistCA on orchestrate_simulate, in C++: rows move in memory as tables say, forward to
// the attention layout and back. Ends with 0 when all holds, else with 1.

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <string>
#include <string_view>

#include "waybill/plan.h"

namespace {

using namespace waybill;

constexpr std::int64_t world_size = 4;
constexpr std::int64_t total_seq_len = 32;  // rows of each rank
constexpr std::int64_t hidden = 8;

int num_failures = 0;

void check(std::string_view claim, bool ok) {
  std::cout << (ok ? "  ok      " : "  FAILED  ") << claim << "\n";
  num_failures += ok ? 0 : 1;
}

/// Rows [world_size, rows, hidden], each with a number of its own.
HostTensor numbered(std::int64_t rows) {
  HostTensor tensor(DType::float32, {world_size, rows, hidden});
  float number = 0;
  for (float& value : tensor.as<float>()) value = ++number;
  return tensor;
}

/// "Forward Pass Simulation" and "Reverse Pass Simulation" of the page.
void forward_and_back() {
  const E2eMetadata made =
      create_qkv_dispatch(world_size, total_seq_len, 3, /*max_cp_degree=*/4, /*seed=*/1).metadata;
  const HostTensor input = numbered(total_seq_len);
  const std::int64_t max_recv_tokens = std::ranges::max(made.fwd_q.num_total_recv_tokens);
  HostTensor attention(DType::float32, {world_size, max_recv_tokens, hidden});
  orchestrate_simulate(input.view(), attention.view(), made.fwd_q);

  HostTensor home(DType::float32, input.shape());
  orchestrate_simulate(attention.view(), home.view(), made.rev_q);
  check("every row is back where it left", std::ranges::equal(home.bytes(), input.bytes()));
}

/// "Multi-destination handling" and "Padding behavior": copies go to several ranks, -1 to none.
void copies_and_padding() {
  Metadata metadata;
  metadata.dst_rank = IndexArray::cube({{{0, 1}, {-1, -1}}, {{1, -1}, {-1, -1}}});
  metadata.dst_offset = IndexArray::cube({{{0, 0}, {0, 0}}, {{2, 0}, {0, 0}}});
  metadata.seq_len = IndexArray::matrix({{2, 0}, {1, 0}});
  HostTensor input(DType::int64, {2, 2, 1});
  std::ranges::copy(std::initializer_list<std::int64_t>{10, 11, 20, 21},
                    input.as<std::int64_t>().begin());
  HostTensor output(DType::int64, {2, 3, 1});
  orchestrate_simulate(input.view(), output.view(), metadata);
  check("both ranks have the first shard, rank 1 the other, too",
        std::ranges::equal(output.as<std::int64_t>(),
                           std::initializer_list<std::int64_t>{10, 11, 0, 10, 11, 20}));
}

/// "Error Handling": the text has all that the page prints, and nothing was written.
void errors() {
  Metadata metadata;
  metadata.dst_rank = IndexArray::matrix({{0}, {1}});
  metadata.dst_offset = IndexArray::matrix({{0}, {30}});
  metadata.seq_len = IndexArray::matrix({{4}, {4}});
  HostTensor input(DType::float32, {2, 4, hidden});
  std::ranges::fill(input.as<float>(), 1.0F);
  HostTensor output(DType::float32, {2, 32, hidden});
  std::string text;
  try {
    orchestrate_simulate(input.view(), output.view(), metadata);
  } catch (const InvalidArgument& error) {
    text = error.what();
  }
  std::cout << "  " << text << "\n";
  check("the error names source and destination",
        text.find("source rank 1, destination rank 1") != std::string::npos);
  check("nothing was written",
        std::ranges::all_of(output.as<float>(), [](float value) { return value == 0; }));
}

}  // namespace

int main() {
  try {
    forward_and_back();
    copies_and_padding();
    errors();
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
  return num_failures == 0 ? 0 : 1;
}
