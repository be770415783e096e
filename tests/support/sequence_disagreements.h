#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "support/packed_plan.h"
#include "support/random_relay.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/runtime/sequence_dispatcher.h"

namespace waybill::test {

/// Documents of a world, and what a rank may take for them that has got something wrong.
struct DocumentRoutings {
  static constexpr std::int64_t tokens_per_rank = 24;

  explicit DocumentRoutings(std::int32_t world_size)
      : usual(routing(world_size, 0)),
        by_one_token(routing(world_size, 1)),
        same_sizes(usual),
        relay(random_relay(usual.fwd_kv, 1)) {
    mirror(same_sizes.fwd_q);
    mirror(same_sizes.fwd_kv);
  }

  QkvRouting usual;
  QkvRouting by_one_token;  ///< a document ends a token later, the next one is shorter
  QkvRouting same_sizes;    ///< as many rows from each rank to each, at other places
  RelaySchedule relay;      ///< of the usual one

 private:
  static QkvRouting routing(std::int32_t world_size, std::int64_t more) {
    std::vector<std::int64_t> lengths;
    for (std::int32_t r = 0; r < world_size; ++r) {
      lengths.push_back(tokens_per_rank / 2 + r % 3);
      lengths.push_back(tokens_per_rank / 2 - r % 3);
    }
    lengths[0] += more;
    lengths[1] -= more;
    return compute_qkv_routing(packed_plan(
        lengths,
        {.world_size = world_size, .tokens_per_rank = tokens_per_rank, .shard_tokens = 4}));
  }

  /// The last rows of each rank become the first.
  static void mirror(SparseMetadata& metadata) {
    std::vector<std::int64_t> rows(metadata.world_size);
    const auto for_copies = [&](const auto& visit) {
      for (std::int64_t j = 0; j < metadata.num_entries(); ++j) {
        for (auto c = metadata.destination_begin(j); c < metadata.destination_end(j); ++c) {
          visit(rows[metadata.dst_rank[c]], metadata.dst_offset[c], metadata.seq_len[j]);
        }
      }
    };
    for_copies([](std::int64_t& end, std::int64_t offset, std::int64_t length) {
      end = std::max(end, offset + length);
    });
    for_copies([](std::int64_t end, std::int64_t& offset, std::int64_t length) {
      offset = end - offset - length;
    });
  }
};

/// What the ranks move: Q, and K and V.
struct DocumentFormats {
  TensorFormat q{DType::bfloat16, 64};
  std::vector<TensorFormat> kv{{DType::bfloat16, 32}, {DType::bfloat16, 32}};
};

/// Tensors of a rank, in the memory of its world, with any contents; they stay.
using TakeTensor = std::function<TensorView(DType, Shape)>;

/// One rank with a dispatcher, and what it needs for calls of any plan.
class DisagreeingRank {
 public:
  DisagreeingRank(World& world, const DocumentRoutings& documents, TakeTensor take,
                  const SequenceDispatcherOptions& options = {}, Stream stream = {})
      : world_(world),
        documents_(documents),
        take_(std::move(take)),
        stream_(stream),
        dispatcher_(world, options) {
    dispatcher_.reserve(std::int64_t{1} << 20, stream_, 256);
  }

  [[nodiscard]] World& world() { return world_; }
  [[nodiscard]] const DocumentRoutings& documents() const { return documents_; }
  [[nodiscard]] SequenceDispatcher& dispatcher() { return dispatcher_; }
  [[nodiscard]] Stream stream() const { return stream_; }

  /// Whether it is the one that does otherwise: the last, whom others do not name first anyway.
  [[nodiscard]] bool is_odd() const { return to_int(world_.rank()) == world_.world_size() - 1; }

  [[nodiscard]] static std::vector<SequencePart> forward_of(const QkvRouting& routing,
                                                            const DocumentFormats& formats = {},
                                                            const RelaySchedule* relay = nullptr) {
    return {{&routing.fwd_q, {formats.q}}, {&routing.fwd_kv, formats.kv, relay}};
  }
  [[nodiscard]] static std::vector<SequencePart> kv_of(const QkvRouting& routing,
                                                       const DocumentFormats& formats = {}) {
    return {{&routing.fwd_kv, formats.kv}};
  }

  PlanHandle plan(const std::vector<SequencePart>& parts) {
    return dispatcher_.plan_dispatch(parts, stream_);
  }
  PlanHandle gradient_plan(const std::vector<SequencePart>& parts) {
    return dispatcher_.plan_kv_gradient(parts, stream_);
  }

  void dispatch(const PlanHandle& ready, std::uint64_t of_dispatch = 0) {
    std::vector<ConstTensorView> inputs;
    const PlanHandle& plan = ready;
    for (std::size_t t = 0; t < plan.tensors().size(); ++t)
      inputs.emplace_back(take(plan.tensors()[t], plan.own_rows()[t]));
    (void)dispatcher_.dispatch(ready, inputs, stream_, of_dispatch);
  }

  void gradient(const PlanHandle& ready, std::uint64_t of_dispatch = 0) {
    std::vector<ConstTensorView> inputs;
    std::vector<TensorView> outputs;
    const PlanHandle& plan = ready;
    for (std::size_t t = 0; t < plan.tensors().size(); ++t) {
      inputs.emplace_back(take(plan.tensors()[t], plan.window_rows()[t]));
      outputs.push_back(take(plan.tensors()[t], plan.own_rows()[t]));
    }
    dispatcher_.kv_gradient(ready, inputs, outputs, stream_, of_dispatch);
  }

  void synchronize() { dispatcher_.synchronize(stream_); }

 private:
  TensorView take(const TensorFormat& format, std::int64_t rows) {
    return take_(format.dtype, {rows, format.hidden});
  }

  World& world_;
  const DocumentRoutings& documents_;
  TakeTensor take_;
  Stream stream_;
  SequenceDispatcher dispatcher_;
};

/// Calls in which the odd rank does not do what the others do.
struct PlantedDisagreement {
  const char* name;
  std::function<void(DisagreeingRank&)> calls;
  std::vector<std::string> named;  ///< in the error of each rank that meets it
};

namespace planted {

/// Ranks agree first, so that there is something old in every slot.
inline void agree_first(DisagreeingRank& rank) {
  const auto forward_plan = rank.plan(DisagreeingRank::forward_of(rank.documents().usual));
  const auto back = rank.gradient_plan(DisagreeingRank::kv_of(rank.documents().usual));
  for (int i = 0; i < 2; ++i) {
    rank.dispatch(forward_plan);
    rank.gradient(back, rank.dispatcher().last_dispatch());
    rank.dispatch(forward_plan);
  }
}

/// A dispatch by the plan that `parts` makes.
inline void dispatch_parts(DisagreeingRank& rank, const std::vector<SequencePart>& parts) {
  const auto plan = rank.plan(parts);
  agree_first(rank);
  rank.dispatch(plan);
}

inline void other_formats(DisagreeingRank& rank, const DocumentFormats& formats) {
  const QkvRouting& routing = rank.documents().usual;
  dispatch_parts(rank, rank.is_odd() ? DisagreeingRank::forward_of(routing, formats)
                                     : DisagreeingRank::forward_of(routing));
}

inline void swapped_dispatches(DisagreeingRank& rank) {
  const auto one = rank.plan(DisagreeingRank::forward_of(rank.documents().usual));
  const auto two = rank.plan(DisagreeingRank::forward_of(rank.documents().same_sizes));
  agree_first(rank);
  rank.dispatch(rank.is_odd() ? two : one);
  rank.dispatch(rank.is_odd() ? one : two);
}

inline void dispatch_against_gradient(DisagreeingRank& rank) {
  const auto forward_plan = rank.plan(DisagreeingRank::forward_of(rank.documents().usual));
  const auto back = rank.gradient_plan(DisagreeingRank::kv_of(rank.documents().usual));
  agree_first(rank);
  if (rank.is_odd()) {
    rank.gradient(back);
  } else {
    rank.dispatch(forward_plan);
  }
}

inline void swapped_gradients(DisagreeingRank& rank) {
  const auto forward_plan = rank.plan(DisagreeingRank::forward_of(rank.documents().usual));
  const auto back = rank.gradient_plan(DisagreeingRank::kv_of(rank.documents().usual));
  agree_first(rank);
  rank.dispatch(forward_plan);
  const std::uint64_t first = rank.dispatcher().last_dispatch();
  rank.dispatch(forward_plan);
  const std::uint64_t second = rank.dispatcher().last_dispatch();
  rank.gradient(back, rank.is_odd() ? first : second);
  rank.gradient(back, rank.is_odd() ? second : first);
}

/// The same where gradients go home by a dispatch, as those of Q do.
inline void swapped_query_gradients(DisagreeingRank& rank) {
  const auto forward_plan = rank.plan(DisagreeingRank::forward_of(rank.documents().usual));
  const auto home = rank.plan({{&rank.documents().usual.rev_q, {DocumentFormats().q}}});
  agree_first(rank);
  rank.dispatch(forward_plan);
  const std::uint64_t first = rank.dispatcher().last_dispatch();
  rank.dispatch(forward_plan);
  const std::uint64_t second = rank.dispatcher().last_dispatch();
  rank.dispatch(home, rank.is_odd() ? first : second);
  rank.dispatch(home, rank.is_odd() ? second : first);
}

/// Between forward and backward one rank gets another routing.
inline void replaced_routing(DisagreeingRank& rank) {
  const auto forward_plan = rank.plan(DisagreeingRank::forward_of(rank.documents().usual));
  auto back = rank.gradient_plan(DisagreeingRank::kv_of(rank.documents().usual));
  agree_first(rank);
  rank.dispatch(forward_plan);
  if (rank.is_odd()) {
    rank.dispatcher().replace_plan(back, DisagreeingRank::kv_of(rank.documents().same_sizes),
                                   rank.stream());
  }
  rank.gradient(back, rank.dispatcher().last_dispatch());
}

}  // namespace planted

/// What the ranks of a dispatcher notice in a call.
inline std::vector<PlantedDisagreement> planted_disagreements() {
  const std::string plan = "the plan differs";
  const std::string formats = "the tensors' format (dtype, hidden, parts) differs";
  const auto routing = [](QkvRouting DocumentRoutings::*odd) {
    return [odd](DisagreeingRank& rank) {
      const DocumentRoutings& documents = rank.documents();
      planted::dispatch_parts(
          rank, DisagreeingRank::forward_of(rank.is_odd() ? documents.*odd : documents.usual));
    };
  };
  const auto format = [](DocumentFormats odd) {
    return [odd = std::move(odd)](DisagreeingRank& rank) { planted::other_formats(rank, odd); };
  };
  const TensorFormat q{DType::bfloat16, 64};
  const TensorFormat half{DType::bfloat16, 32};
  return {
      {"lengths_by_one_token", routing(&DocumentRoutings::by_one_token), {"dispatch: ", plan}},
      {"another_plan_of_the_same_sizes", routing(&DocumentRoutings::same_sizes), {plan}},
      {"a_relay_for_one_rank",
       [](DisagreeingRank& rank) {
         const DocumentRoutings& documents = rank.documents();
         planted::dispatch_parts(
             rank, DisagreeingRank::forward_of(documents.usual, {},
                                               rank.is_odd() ? &documents.relay : nullptr));
       },
       {plan}},
      {"order_of_dispatches", planted::swapped_dispatches, {plan}},
      {"dispatch_against_gradient",
       planted::dispatch_against_gradient,
       {" calls ", "dispatch", "kv_gradient"}},
      {"dtype", format({.q = {DType::float16, 64}, .kv = {half, half}}), {formats}},
      {"hidden", format({.q = q, .kv = {half, {DType::bfloat16, 64}}}), {formats}},
      {"kv_layout", format({.q = q, .kv = {{DType::bfloat16, 64}}}), {formats}},
      {"order_of_gradients",
       planted::swapped_gradients,
       {"kv_gradient: ", "belongs to dispatch", "dispatch 5 on rank", "dispatch 6 on rank"}},
      {"order_of_query_gradients",
       planted::swapped_query_gradients,
       {"belongs to dispatch", "dispatch 5 on rank", "dispatch 6 on rank"}},
      {"replaced_routing", planted::replaced_routing, {"kv_gradient: ", plan}},
  };
}

}  // namespace waybill::test
