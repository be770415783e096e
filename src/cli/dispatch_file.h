#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "waybill/json/options.h"
#include "waybill/planner/attention_plan.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/metadata.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::cli {

/// What a JSON file of ours holds: a plan; a plan with its metadata; or one metadata.
struct DispatchFile {
  std::string name;  ///< for messages
  std::optional<QkvPlan> plan;
  std::optional<AttentionPlan> attention;  ///< the same plan with its figures, of `plan --full`
  std::optional<E2eMetadata> bundle;       ///< only beside a plan
  std::optional<Metadata> metadata;        ///< alone
};

/// @throws IoError for what cannot be read or holds something else.
[[nodiscard]] DispatchFile read_dispatch_file(const std::string& path, ReadCheck check);

/// The same for a text that was read already; throws for one without a plan.
[[nodiscard]] DispatchFile plan_from_text(const std::string& text, const std::string& name,
                                          ReadCheck check);

/// The same, but throws for a file without a plan.
[[nodiscard]] DispatchFile read_plan_file(const std::string& path, ReadCheck check);

/// One of the four metadata by its name. @throws UsageError for another name.
[[nodiscard]] Metadata& table_of(E2eMetadata& metadata, std::string_view name);

/// Throws unless the routing of the plan, in the sparse form, fits a machine's memory: a KV shard
/// has up to as many copies as its document has shards. @throws Unsupported
void check_routing_size(const QkvPlan& plan);

/// The same for the dense form, which has W x (W + 1) and W x S x C entries.
void check_dense_size(const QkvPlan& plan, const QkvRouting& routing);

}  // namespace waybill::cli
