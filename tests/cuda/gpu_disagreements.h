#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/gpu_processes.h"
#include "support/sequence_disagreements.h"

namespace waybill::test {

/// Relays wherever there are schedules; several batches.
inline SequenceDispatcherOptions disagreement_options() {
  return {.num_sms = 4, .plan = {.relay = RelayUse::always, .batch_bytes = 256}};
}

/// Runs calls until an error; the dispatcher is then of no use. @return its text
inline std::string text_of_end(World& world, const DocumentRoutings& documents,
                               const SequenceDispatcherOptions& options,
                               const std::function<void(DisagreeingRank&)>& calls) {
  DeviceArena arena(world, std::int64_t{16} << 20);
  const auto take = [&](DType dtype, Shape shape) { return arena.take(dtype, shape); };
  DisagreeingRank rank(world, documents, take, options, {arena.stream()});
  std::string text;
  try {
    calls(rank);
    rank.synchronize();
    return "no error";
  } catch (const std::exception& error) {
    text = error.what();
  }
  if (text.find("ranks disagree") == std::string::npos) return text;
  try {
    rank.synchronize();
    return "no error when asked again, after: " + text;
  } catch (const std::exception&) {  // the device keeps the report
  }
  try {
    rank.dispatch(PlanHandle{});
    return "the dispatcher is still of use, after: " + text;
  } catch (const TransportError&) {
    return text;
  } catch (const std::exception& error) {
    return concat("another error: ", error.what(), ", after: ", text);
  }
}

/// All ranks end with a text that holds all parts: those with a report of their own, and those that
/// lost their device to that of another rank.
inline void expect_named(const std::vector<std::string>& texts,
                         const std::vector<std::string>& parts) {
  for (std::size_t r = 0; r < texts.size(); ++r) {
    for (const std::string& part : parts)
      EXPECT_NE(texts[r].find(part), std::string::npos)
          << "rank " << r << ": \"" << texts[r] << "\"\nlacks " << part;
  }
}

/// The most likely disagreements, where ranks are processes. All are named by all.
inline void check_disagreeing_processes(std::int32_t world_size, const MakeGpuWorld& make,
                                        double deadline_s = 4) {
  const DocumentRoutings documents(world_size);
  for (const PlantedDisagreement& sample : planted_disagreements()) {
    const std::string name = sample.name;
    if (name != "lengths_by_one_token" && name != "another_plan_of_the_same_sizes" &&
        name != "order_of_gradients") {
      continue;
    }
    SCOPED_TRACE(name);
    const auto ends = run_gpu_processes(
        world_size, make,
        [&](World& world) {
          throw std::runtime_error(
              text_of_end(world, documents, disagreement_options(), sample.calls));
        },
        deadline_s);
    std::vector<std::string> texts;
    for (const ProcessEnd& end : ends) texts.push_back(end.text);
    auto parts = sample.named;
    parts.emplace_back("ranks disagree in call ");
    expect_named(texts, parts);
  }
}

}  // namespace waybill::test
