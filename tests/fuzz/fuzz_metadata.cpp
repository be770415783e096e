// Decisions drawn from any bytes: what the library computes without an error must validate clean,
// and neither the validator nor the simulator may be led astray by damaged tables.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "damage.h"
#include "fuzz_input.h"
#include "waybill/core/error.h"
#include "waybill/core/host_tensor.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/routing/validate.h"
#include "waybill/simulate/orchestrate.h"

namespace {

using namespace waybill;
using fuzz::damage;
using fuzz::draw_array;
using fuzz::draw_plan;
using fuzz::Input;

void expect(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "fuzz_metadata: %s\n", what);
  std::abort();
}

void expect_clean(const std::vector<Finding>& findings, const char* what) {
  for (const Finding& finding : findings) std::cerr << finding << '\n';
  expect(findings.empty(), what);
}

/// compute_metadata on anything, and what can be done with the result.
void dense(Input& input) {
  const std::int64_t world = input.below(6);
  const std::int64_t shards = input.below(5);
  const std::int64_t copies = input.below(4);
  Shape shape{world, shards};
  const IndexArray seq_len = draw_array(input, shape, 0, 9);
  if (copies > 0) shape.push_back(copies - 1);
  const IndexArray dispatch =
      draw_array(input, shape, input.below(2) == 0 ? 0 : -1, std::max<std::int64_t>(0, world - 1));
  const auto undispatched = input.below(2) == 0 ? Undispatched::reject : Undispatched::keep;
  DispatchMetadata result;
  try {
    result = compute_metadata(seq_len, dispatch, true, undispatched);
  } catch (const InvalidArgument&) {
    return;
  }
  const auto findings = validate(result.fwd, result.rev);
  for (const Finding& finding : findings) {
    const bool wanted =
        finding.kind == FindingKind::undispatched && undispatched == Undispatched::keep;
    if (!wanted) expect_clean({finding}, "compute_metadata gives what does not validate");
  }
  for (std::int32_t r = 0; r < world; ++r) {
    const Metadata slice = result.fwd.get_slice(Rank{r});
    expect(!to_string(slice).empty() && slice.is_slice(), "a slice is none");
    expect(!to_string(result.rev.get_slice(Rank{r})).empty(), "a slice is none");
  }
  try {
    const Metadata device = result.rev.normalize_dtype();
    expect(device.dst_offset.to_vector() == result.rev.dst_offset.to_vector(),
           "normalize_dtype changes a value");
  } catch (const InvalidArgument&) {
    return;  // over 32 bits
  }
}

void plan_and_routing(Input& input) {
  QkvPlan plan = draw_plan(input);
  if (input.below(4) == 0) damage(input, plan);
  QkvRouting routing;
  try {
    routing = compute_qkv_routing(plan);
  } catch (const InvalidArgument& error) {
    expect(!validate(plan).empty(), error.what());  // refused, but validates
    return;
  }
  expect_clean(validate(plan), "a plan is accepted that does not validate");
  expect_clean(validate(plan, routing), "compute_qkv_routing gives what does not validate");
  expect_clean(validate(plan, to_dense(routing)), "to_dense gives what does not validate");
}

/// Damaged rows must never be read or written; the sanitizer watches.
void simulate(Input& input, const Metadata& metadata, std::int64_t world) {
  const HostTensor source(DType::uint8, {world, input.below(40), 3});
  HostTensor output(DType::uint8, {world, input.below(40), 3});
  SimulateOptions options;
  options.num_threads = 1;
  options.overlap = input.below(2) == 0 ? Overlap::reject : Overlap::last_wins;
  try {
    orchestrate_simulate(source.view(), output.view(), metadata, options);
  } catch (const InvalidArgument&) {
    return;
  }
}

void damaged_dense(Input& input) {
  const QkvPlan plan = draw_plan(input);
  E2eMetadata metadata;
  try {
    metadata = to_dense(compute_qkv_routing(plan));
  } catch (const InvalidArgument&) {
    return;
  }
  for (std::int64_t i = 1 + input.below(3); i > 0; --i) {
    switch (input.below(5)) {
      case 0:
        damage(input, metadata.fwd_q);
        break;
      case 1:
        damage(input, metadata.rev_q);
        break;
      case 2:
        damage(input, metadata.fwd_kv);
        break;
      case 3:
        damage(input, metadata.rev_kv);
        break;
      default:
        damage(input, metadata.attention);
        break;
    }
  }
  (void)validate(plan, metadata);
  (void)validate(metadata.fwd_q, metadata.rev_q);
  (void)validate(metadata.fwd_kv, metadata.rev_kv);
  simulate(input, metadata.fwd_q, plan.world_size);
  simulate(input, metadata.fwd_kv, plan.world_size);
}

void damaged_sparse(Input& input) {
  QkvPlan plan = draw_plan(input);
  QkvRouting routing;
  try {
    routing = compute_qkv_routing(plan);
  } catch (const InvalidArgument&) {
    return;
  }
  for (std::int64_t i = 1 + input.below(3); i > 0; --i) {
    switch (input.below(6)) {
      case 0:
        damage(input, routing.fwd_q);
        break;
      case 1:
        damage(input, routing.rev_q);
        break;
      case 2:
        damage(input, routing.fwd_kv);
        break;
      case 3:
        damage(input, routing.rev_kv);
        break;
      case 4:
        damage(input, routing.attention);
        break;
      default:
        damage(input, plan);
        break;
    }
  }
  (void)validate(plan, routing);
  (void)validate(routing.fwd_q, routing.rev_q);
  (void)validate(routing.fwd_kv, routing.rev_kv);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input({data, size});
  switch (input.below(4)) {
    case 0:
      dense(input);
      break;
    case 1:
      plan_and_routing(input);
      break;
    case 2:
      damaged_dense(input);
      break;
    default:
      damaged_sparse(input);
      break;
  }
  return 0;
}
