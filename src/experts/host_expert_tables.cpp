#include "host_executor.h"

#include <algorithm>

#include "core/to_size.h"

namespace waybill::detail {
namespace {

ConstTensorView table(const std::vector<std::int32_t>& values, Shape shape) {
  return {values.data(), DType::int32, shape};
}

}  // namespace

ExpertTableViews HostExpertRouting::views() const {
  const std::int64_t world = config_.world_size;
  const std::int64_t experts = config_.num_experts_per_rank();
  const std::int64_t topk = config_.topk;
  const std::int64_t received = std::ssize(tags);
  ExpertTableViews views;
  views.ids = table(ids, shape_by_id());
  views.dst_rows = table(dst_rows, {config_.num_nodes(), config_.max_tokens, topk});
  views.num_input_tokens = table(rows->num_input_tokens, {world});
  views.splits = table(rows->splits, {world, config_.num_experts + 1});
  views.segment_offsets = table(rows->segment_offsets, {world, experts, world});
  views.expert_counts = {
      rows->expert_counts.data() + config_.rank * experts, DType::int32, {experts}};
  views.expert_offsets = {
      rows->expert_offsets.data() + config_.rank * (experts + 1), DType::int32, {experts + 1}};
  views.num_recv_rows = table(rows->num_recv_rows, {world});
  views.required_rows = {&required_rows, DType::int32, {1}};
  views.primary_rows = table(primary_rows, {received});
  views.topk_slot_rows = table(topk_slot_rows, {received, topk});
  views.send_reqs = table(send_reqs, {config_.num_nodes(), 2, config_.max_tokens});
  views.recv_topk = table(recv_topk, {received, topk});
  views.compact_to_grouped = table(compact_to_grouped, {received, topk});
  views.grouped_to_compact = table(grouped_to_compact, {std::ssize(grouped_to_compact)});
  views.recv_tags = {tags.data(), DType::int32, {received, 4}};
  return views;
}

Shape HostExpertRouting::shape_by_id() const {
  if (!config_.is_intra_node()) return {config_.num_nodes(), config_.max_tokens, config_.topk};
  return {rows->num_input_tokens[config_.rank], config_.topk};
}

std::size_t HostExpertRouting::first_entry(std::int32_t node) const {
  return config_.is_intra_node() ? 0 : node * config_.max_tokens * config_.topk;
}

std::span<std::int32_t> HostExpertRouting::ids_of(std::int32_t node) {
  return std::span(ids).subspan(
      first_entry(node), to_size(rows->num_input_tokens[peer(node)]) * to_size(config_.topk));
}

std::span<std::int32_t> HostExpertRouting::places_of(std::int32_t node) {
  return std::span(dst_rows).subspan(
      node * config_.max_tokens * config_.topk,
      to_size(rows->num_input_tokens[peer(node)]) * to_size(config_.topk));
}

std::span<const std::int32_t> HostExpertRouting::ids_of(std::int32_t node) const {
  return const_cast<HostExpertRouting*>(this)->ids_of(node);  // NOLINT: it only looks
}

std::span<const std::int32_t> HostExpertRouting::places_of(std::int32_t node) const {
  return const_cast<HostExpertRouting*>(this)->places_of(node);  // NOLINT: it only looks
}

std::int64_t HostExpertRouting::num_rows(std::int64_t capacity_rows) const {
  return std::min<std::int64_t>(rows->num_recv_rows[config_.rank], capacity_rows);
}

void HostExpertRouting::read_tags(std::span<const RowTag> received) {
  const std::int64_t topk = config_.topk;
  tags.assign(received.begin(), received.end());
  primary_rows.assign(tags.size(), -1);
  topk_slot_rows.assign(tags.size() * topk, -1);
  for (std::size_t row = 0; row < tags.size(); ++row) {
    const RowTag& tag = tags[row];
    if (tag.source_rank < 0) continue;
    primary_rows[row] = tag.primary_row;
    topk_slot_rows[tag.primary_row * topk + tag.topk_slot] = static_cast<std::int32_t>(row);
  }
}

void HostExpertRouting::read_topk(std::span<const std::int32_t> received) {
  recv_topk.assign(received.begin(), received.end());
  const std::int64_t experts = config_.num_experts_per_rank();
  const auto first = rows->expert_offsets.begin() + config_.rank * (experts + 1);
  // Compact rows are ordered by source and token: so are the places of each expert.
  std::vector<std::int32_t> next(first, first + experts);
  compact_to_grouped.assign(recv_topk.size(), -1);
  grouped_to_compact.assign(first[experts], -1);
  for (std::size_t entry = 0; entry < recv_topk.size(); ++entry) {
    if (recv_topk[entry] < 0) continue;
    const std::int32_t place = next[recv_topk[entry]]++;
    compact_to_grouped[entry] = place;
    grouped_to_compact[place] = static_cast<std::int32_t>(entry / to_size(config_.topk));
  }
}

ConstTensorView HostExpertTables::weights() const {
  if (!has_weights_) return {};
  return {weights_.data(), weight_dtype_, routing_->shape_by_id()};
}

void HostExpertTables::carry_weights() {
  has_weights_ = true;
  weights_.resize(routing_->ids.size() * dtype_bytes(weight_dtype_));
}

std::byte* HostExpertTables::weights_of(std::int32_t node) {
  if (!has_weights_) return nullptr;
  return weights_.data() + routing_->first_entry(node) * dtype_bytes(weight_dtype_);
}

const std::byte* HostExpertTables::weights_of(std::int32_t node) const {
  return const_cast<HostExpertTables*>(this)->weights_of(node);  // NOLINT: it only looks
}

}  // namespace waybill::detail
