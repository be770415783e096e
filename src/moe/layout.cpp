#include "layout_desc.h"

#include <algorithm>
#include <vector>

#include "core/to_size.h"

namespace waybill::detail {
namespace {

IndexArray int32_array(const std::vector<std::int32_t>& values, Shape shape) {
  return IndexArray::copy_of(values.data(), shape, DType::int32);
}

IndexArray int64_array(const std::vector<std::int32_t>& values, Shape shape) {
  return {shape, std::vector<std::int64_t>(values.begin(), values.end())};
}

/// Ids and rows of the ranks of the same local index, node by node.
void fill_columns(const ExpertDispatch& dispatch, std::int32_t rank, bool positions_given,
                  EPAll2AllLayoutDesc& desc) {
  const EPConfig& config = dispatch.config;
  const std::int64_t entries = config.max_tokens * config.topk;
  const std::int32_t local = config.local_world_size;
  std::vector<std::int32_t> ids(config.num_nodes() * entries, -1);
  std::vector<std::int32_t> rows(ids.size(), -1);
  for (std::int32_t node = 0; node < config.num_nodes(); ++node) {
    const std::size_t peer = node * local + rank % local;
    const auto& peer_ids = dispatch.ids[peer];
    std::ranges::copy(peer_ids, ids.begin() + node * entries);
    for (std::size_t i = 0; i < peer_ids.size(); ++i) {
      const bool here = config.rank_of_expert(peer_ids[i]) / local == rank / local;
      if (here || positions_given) rows[node * entries + i] = dispatch.dst_row[peer][i];
    }
  }
  const Shape shape{config.num_nodes(), config.max_tokens, config.topk};
  desc.token_dst_scatter_idx = int32_array(rows, shape);
  if (config.is_intra_node()) {
    desc.topk_indices_tensor =
        int32_array(dispatch.ids[rank], {desc.num_dispatch_token_cur_rank, config.topk});
  } else {
    desc.topk_indices_tensor = int32_array(ids, shape);
  }
}

/// The runs of tokens that came from the ranks of the same local index.
void fill_send_requests(const ExpertDispatch& dispatch, std::int32_t rank,
                        EPAll2AllLayoutDesc& desc) {
  const EPConfig& config = dispatch.config;
  if (config.is_intra_node()) return;
  const std::int64_t plane = 2 * config.max_tokens;
  const std::int32_t own = rank / config.local_world_size;
  std::vector<std::int32_t> received(config.num_nodes() * plane, -1);
  for (std::int32_t node = 0; node < config.num_nodes(); ++node) {
    if (node == own) continue;
    const std::int32_t peer = node * config.local_world_size + rank % config.local_world_size;
    const auto sent = node_send_requests(config, peer, dispatch.ids[peer]);
    std::copy_n(sent.begin() + own * plane, plane, received.begin() + node * plane);
  }
  desc.send_reqs_recv_tensor = int32_array(received, {config.num_nodes(), 2, config.max_tokens});
}

/// Which rows of a rank are of the same token.
void fill_duplicate_maps(const ExpertDispatch& dispatch, std::int32_t rank,
                         EPAll2AllLayoutDesc& desc) {
  const EPConfig& config = dispatch.config;
  if (!config.is_intra_node() || dispatch.options.rows == EPRows::compact) return;
  const std::int64_t count = dispatch.rows.num_recv_rows[rank];
  std::vector<std::int32_t> primary_row(count, -1);
  std::vector<std::int32_t> topk_slots(count * config.topk, -1);
  for (std::size_t src = 0; src < dispatch.ids.size(); ++src) {
    std::int32_t first = -1;
    for (std::size_t i = 0; i < dispatch.ids[src].size(); ++i) {
      const auto topk_slot = static_cast<std::int64_t>(i) % config.topk;
      if (topk_slot == 0) first = -1;
      if (config.rank_of_expert(dispatch.ids[src][i]) != rank) continue;
      const std::int32_t row = dispatch.dst_row[src][i];
      if (first < 0) first = row;
      primary_row[row] = first;
      topk_slots[std::int64_t{first} * config.topk + topk_slot] = row;
    }
  }
  desc.skipped_token_mapping_indices = int64_array(primary_row, {count});
  desc.skipped_token_topk_mapping_indices = int64_array(topk_slots, {count, config.topk});
}

/// Between compact rows and the rows that a grouped dispatch would have given.
void fill_compact_maps(const ExpertDispatch& dispatch, std::int32_t rank,
                       EPAll2AllLayoutDesc& desc) {
  const EPConfig& config = dispatch.config;
  if (dispatch.options.rows != EPRows::compact) return;
  EPDispatchOptions grouped = dispatch.options;
  grouped.rows = EPRows::grouped;
  const std::int64_t experts = config.num_experts_per_rank();
  const std::int64_t count = dispatch.rows.num_recv_rows[rank];
  const std::int64_t places = dispatch.rows.expert_offsets[rank * (experts + 1) + experts];
  std::vector<std::int32_t> topk(count * config.topk, -1);
  std::vector<std::int32_t> to_grouped(topk.size(), -1);
  std::vector<std::int32_t> to_compact(places, -1);
  for (std::int32_t src = 0; src < config.world_size; ++src) {
    const auto& ids = dispatch.ids[src];
    const auto place = place_topk_slots(config, grouped, dispatch.rows, src, ids);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (config.rank_of_expert(ids[i]) != rank) continue;
      const std::int32_t row = dispatch.dst_row[src][i];
      const std::size_t entry = to_size(std::int64_t{row} * config.topk) + i % to_size(config.topk);
      topk[entry] = static_cast<std::int32_t>(ids[i] % experts);
      to_grouped[entry] = place[i];
      to_compact[place[i]] = row;
    }
  }
  desc.recv_topk_indices = int32_array(topk, {count, config.topk});
  desc.compact_to_grouped = int32_array(to_grouped, {count, config.topk});
  desc.grouped_to_compact = int32_array(to_compact, {places});
}

}  // namespace

void fill_layouts(ExpertDispatch& dispatch, bool positions_given) {
  const EPConfig& config = dispatch.config;
  const std::int64_t experts = config.num_experts_per_rank();
  const auto part = [](const std::vector<std::int32_t>& table, std::int64_t first,
                       std::int64_t count) {
    return IndexArray::copy_of(table.data() + first, {count}, DType::int32);
  };
  for (std::int32_t rank = 0; rank < config.world_size; ++rank) {
    EPAll2AllLayoutDesc desc;
    desc.num_dispatch_token_cur_rank = dispatch.rows.num_input_tokens[rank];
    desc.num_input_tokens_per_rank = part(dispatch.rows.num_input_tokens, 0, config.world_size);
    desc.recv_expert_counts = part(dispatch.rows.expert_counts, rank * experts, experts);
    desc.recv_expert_offsets =
        part(dispatch.rows.expert_offsets, rank * (experts + 1), experts + 1);
    fill_columns(dispatch, rank, positions_given, desc);
    fill_send_requests(dispatch, rank, desc);
    fill_duplicate_maps(dispatch, rank, desc);
    fill_compact_maps(dispatch, rank, desc);
    dispatch.layout.push_back(std::move(desc));
  }
}

}  // namespace waybill::detail
