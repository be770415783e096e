#include "waybill/moe/simulate.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "input_checks.h"
#include "moe/token_routes.h"
#include "waybill/core/error.h"
#include "waybill/moe/payload_format.h"

namespace waybill {
namespace {

constexpr const char* in_dispatch = "simulate_expert_dispatch";

void check_entries(std::int64_t entries, const EPConfig& config, const char* name) {
  require(entries == config.world_size, in_dispatch, ": ", name, " has ", entries,
          " entries, expected one for each of ", config.world_size, " ranks");
}

HostTensor copy_rows(const ConstTensorView& view) {
  HostTensor result(view.dtype, view.shape);
  const std::int64_t row_bytes = view.shape[1] * dtype_bytes(view.dtype);
  for (std::int64_t row = 0; row < view.shape[0] && row_bytes > 0; ++row) {
    std::memcpy(result.bytes().data() + row * row_bytes,
                view.data + row * view.strides[0] * dtype_bytes(view.dtype), row_bytes);
  }
  return result;
}

std::vector<std::int64_t> read_positions(const EPConfig& config, const EPDispatchOptions& options,
                                         const ConstTensorView& view, std::int64_t total_tokens) {
  require(options.rows == EPRows::grouped && options.expert_alignment == 1, in_dispatch,
          ": full_scatter_indices are for grouped rows without padding; got ",
          options.rows == EPRows::grouped ? "grouped" : "compact",
          " rows, expert_alignment = ", options.expert_alignment);
  require(options.spare_experts == 0, in_dispatch,
          ": full_scatter_indices are given, expected none with spare_experts = ",
          options.spare_experts);
  require(view.dtype == DType::int32 || view.dtype == DType::int64, in_dispatch,
          ": full_scatter_indices is ", view.dtype, ", expected int32 or int64");
  require(view.shape == Shape{total_tokens, config.topk}, in_dispatch,
          ": full_scatter_indices has shape ", to_string(view.shape), ", expected [", total_tokens,
          ", ", config.topk, "]: the topk slots of all ranks");
  return detail::read_integers(view);
}

/// Checks the inputs of all ranks and copies ids and weights. @return full_scatter_indices
std::vector<std::int64_t> take_inputs(const ExpertInputs& inputs, ExpertDispatch& dispatch) {
  const EPConfig& config = dispatch.config;
  const EPDispatchOptions& options = dispatch.options;
  config.check(in_dispatch);
  options.check(config, in_dispatch);
  check_entries(std::ssize(inputs.tokens), config, "tokens");
  check_entries(std::ssize(inputs.exp_indices), config, "exp_indices");
  if (!inputs.weights.empty()) check_entries(std::ssize(inputs.weights), config, "weights");
  const bool scaled = options.payload.is_given() && num_scales(config, options) > 0;
  if (scaled) check_entries(std::ssize(inputs.scales), config, "scales");
  require(scaled || inputs.scales.empty(), in_dispatch,
          ": scales are given, expected none: payload = \"", options.payload.name(), "\"");
  const std::int64_t columns = input_columns(config, options);

  std::int64_t total_tokens = 0;
  for (std::int32_t r = 0; r < config.world_size; ++r) {
    const ConstTensorView& tokens = inputs.tokens[r];
    require(tokens.ndim() == 2, in_dispatch, ": tokens[", r, "] has shape ",
            to_string(tokens.shape), ", expected [num_tokens, ", columns, "]");
    const std::int64_t count = tokens.shape[0];
    detail::check_matrix(tokens, count, columns, input_dtype(config, options), in_dispatch,
                         "tokens", r);
    require(count <= config.max_tokens, in_dispatch, ": tokens[", r, "] has ", count,
            " tokens, expected at most max_tokens = ", config.max_tokens);
    require(inputs.exp_indices[r].shape == Shape{count, config.topk}, in_dispatch, ": exp_indices[",
            r, "] has shape ", to_string(inputs.exp_indices[r].shape), ", expected [", count, ", ",
            config.topk, "]");
    dispatch.ids.push_back(read_expert_ids(config, options, inputs.exp_indices[r],
                                           concat(in_dispatch, ": rank ", r).c_str()));
    if (!inputs.weights.empty()) {
      detail::check_matrix(inputs.weights[r], count, config.topk, config.weight_dtype, in_dispatch,
                           "weights", r);
      dispatch.source_weights.push_back(copy_rows(inputs.weights[r]));
    }
    if (scaled) {
      detail::check_matrix(inputs.scales[r], count, num_scales(config, options),
                           options.payload.scale_dtype(), in_dispatch, "scales", r);
    }
    total_tokens += count;
  }
  require(inputs.present.empty() || options.spare_experts > 0, in_dispatch,
          ": present is given, expected none without spare experts");
  if (!inputs.full_scatter_indices) return {};
  return read_positions(config, options, *inputs.full_scatter_indices, total_tokens);
}

void place_all(ExpertDispatch& dispatch, std::span<const std::int64_t> positions) {
  std::vector<std::int32_t> counts;
  for (const auto& ids : dispatch.ids) {
    const auto of_rank = count_topk_slots(dispatch.config, ids);
    counts.insert(counts.end(), of_rank.begin(), of_rank.end());
  }
  dispatch.rows = locate_rows(dispatch.config, dispatch.options, counts);
  std::size_t first = 0;
  for (std::int32_t src = 0; src < dispatch.config.world_size; ++src) {
    const auto& ids = dispatch.ids[src];
    dispatch.dst_row.push_back(
        positions.empty()
            ? place_topk_slots(dispatch.config, dispatch.options, dispatch.rows, src, ids)
            : place_by_scatter_indices(dispatch.config, dispatch.rows, src, ids,
                                       positions.subspan(first, ids.size()), in_dispatch));
    first += ids.size();
  }
}

void allocate_outputs(ExpertDispatch& dispatch) {
  const EPConfig& config = dispatch.config;
  const bool compact = dispatch.options.rows == EPRows::compact;
  for (std::int32_t r = 0; r < config.world_size; ++r) {
    const std::int64_t rows = dispatch.rows.num_recv_rows[r];
    dispatch.recv_tokens.emplace_back(payload_dtype(config, dispatch.options),
                                      Shape{rows, payload_columns(config, dispatch.options)});
    if (const std::int64_t scales = num_scales(config, dispatch.options); scales > 0) {
      dispatch.recv_scales.emplace_back(dispatch.options.payload.scale_dtype(),
                                        Shape{rows, scales});
    }
    if (!dispatch.source_weights.empty()) {
      dispatch.recv_weights.emplace_back(config.weight_dtype,
                                         compact ? Shape{rows, config.topk} : Shape{rows});
    }
    dispatch.recv_origin.push_back(IndexArray::full({rows, 3}, -1).to(DType::int32, "recv_origin"));
  }
}

/// Loads a token as it travels.
void load_payload(const ExpertDispatch& dispatch, const ExpertInputs& inputs, std::size_t src,
                  std::int64_t token, std::span<std::uint8_t> payload,
                  std::span<std::uint8_t> scales) {
  const ConstTensorView& tokens = inputs.tokens[src];
  const std::byte* const row = tokens.data + token * tokens.strides[0] * dtype_bytes(tokens.dtype);
  if (dispatch.options.payload.is_quantized()) {
    quantize_row(dispatch.options.payload.format(), row, tokens.dtype, payload, scales);
    return;
  }
  std::memcpy(payload.data(), row, payload.size());
  if (scales.empty()) return;
  const ConstTensorView& given = inputs.scales[src];
  std::memcpy(scales.data(), given.data + token * given.strides[0] * dtype_bytes(given.dtype),
              scales.size());
}

/// Writes one topk slot of a token where it goes. @return false when another row is there already
bool deliver(ExpertDispatch& dispatch, std::int32_t src, std::int64_t token, std::int64_t topk_slot,
             std::span<const std::uint8_t> payload, std::span<const std::uint8_t> scales) {
  const EPConfig& config = dispatch.config;
  const std::size_t entry = token * config.topk + topk_slot;
  const std::int32_t row = dispatch.dst_row[src][entry];
  if (row < 0) return true;
  const std::size_t dst = config.rank_of_expert(dispatch.ids[src][entry]);
  const bool compact = dispatch.options.rows == EPRows::compact;
  if (!dispatch.source_weights.empty()) {
    const std::int64_t bytes = dtype_bytes(config.weight_dtype);
    const std::int64_t place = compact ? std::int64_t{row} * config.topk + topk_slot : row;
    std::memcpy(dispatch.recv_weights[dst].bytes().data() + place * bytes,
                dispatch.source_weights[src].bytes().data() + bytes * entry, bytes);
  }
  auto* const origin =
      static_cast<std::int32_t*>(dispatch.recv_origin[dst].data()) + std::int64_t{row} * 3;
  if (origin[0] >= 0) return compact;
  origin[0] = src;
  origin[1] = static_cast<std::int32_t>(token);
  origin[2] = static_cast<std::int32_t>(topk_slot);
  std::memcpy(dispatch.recv_tokens[dst].bytes().data() + row * payload.size(), payload.data(),
              payload.size());
  if (scales.empty()) return true;
  std::memcpy(dispatch.recv_scales[dst].bytes().data() + row * scales.size(), scales.data(),
              scales.size());
  return true;
}

IndexArray int32_array(const std::vector<std::int32_t>& values, Shape shape,
                       std::int64_t first = 0) {
  return IndexArray::copy_of(values.data() + first, shape, DType::int32);
}

/// Fills in ids, rows and runs of tokens of the ranks with the same local index, node by node.
void fill_columns(const ExpertDispatch& dispatch, std::int32_t rank, bool positions_given,
                  EPAll2AllLayoutDesc& desc) {
  const EPConfig& config = dispatch.config;
  const std::int64_t entries = config.max_tokens * config.topk;
  const std::int64_t plane = 2 * config.max_tokens;
  const std::int32_t local = config.local_world_size;
  const std::int32_t own = rank / local;
  std::vector<std::int32_t> ids(config.num_nodes() * entries, -1);
  std::vector<std::int32_t> rows(ids.size(), -1);
  std::vector<std::int32_t> runs(config.num_nodes() * plane, -1);
  for (std::int32_t node = 0; node < config.num_nodes(); ++node) {
    const std::int32_t peer = node * local + rank % local;
    const auto& peer_ids = dispatch.ids[peer];
    std::ranges::copy(peer_ids, ids.begin() + node * entries);
    for (std::size_t i = 0; i < peer_ids.size(); ++i) {
      const bool here = config.rank_of_expert(peer_ids[i]) / local == own;
      if (here || positions_given) rows[node * entries + i] = dispatch.dst_row[peer][i];
    }
    if (node == own) continue;
    const auto sent = node_send_requests(config, peer, peer_ids);
    std::copy_n(sent.begin() + own * plane, plane, runs.begin() + node * plane);
  }
  const Shape shape{config.num_nodes(), config.max_tokens, config.topk};
  desc.token_dst_scatter_idx = int32_array(rows, shape);
  if (config.is_intra_node()) {
    desc.topk_indices_tensor =
        int32_array(dispatch.ids[rank], {desc.num_dispatch_token_cur_rank, config.topk});
  } else {
    desc.topk_indices_tensor = int32_array(ids, shape);
    desc.send_reqs_recv_tensor = int32_array(runs, {config.num_nodes(), 2, config.max_tokens});
  }
}

/// Finds which rows of a rank belong to the same token.
void fill_duplicate_maps(const ExpertDispatch& dispatch, std::int32_t rank,
                         EPAll2AllLayoutDesc& desc) {
  const EPConfig& config = dispatch.config;
  if (!config.is_intra_node() || dispatch.options.rows == EPRows::compact) return;
  const std::int64_t count = dispatch.rows.num_recv_rows[rank];
  std::vector<std::int64_t> primary_row(count, -1);
  std::vector<std::int64_t> topk_slots(count * config.topk, -1);
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
  desc.skipped_token_mapping_indices = IndexArray({count}, primary_row);
  desc.skipped_token_topk_mapping_indices = IndexArray({count, config.topk}, topk_slots);
}

/// Makes the maps between compact rows and the rows that a grouped dispatch would have given.
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
    for (std::int64_t i = 0; i < std::ssize(ids); ++i) {
      if (config.rank_of_expert(ids[i]) != rank) continue;
      const std::int32_t row = dispatch.dst_row[src][i];
      const std::int64_t entry = std::int64_t{row} * config.topk + i % config.topk;
      topk[entry] = static_cast<std::int32_t>(ids[i] % experts);
      to_grouped[entry] = place[i];
      to_compact[place[i]] = row;
    }
  }
  desc.recv_topk_indices = int32_array(topk, {count, config.topk});
  desc.compact_to_grouped = int32_array(to_grouped, {count, config.topk});
  desc.grouped_to_compact = int32_array(to_compact, {places});
}

void fill_slots(const ExpertDispatch& dispatch, std::int32_t rank, EPAll2AllLayoutDesc& desc) {
  if (!dispatch.slots) return;
  const EvenExperts& plan = dispatch.slots->plan;
  const std::int64_t slots = plan.slots_per_rank;
  const Shape all{plan.num_ranks, slots};
  desc.slot_experts = int32_array(plan.slots, {slots}, rank * slots);
  desc.all_slot_experts = int32_array(plan.slots, all);
  desc.all_slot_quotas = IndexArray(all, plan.quotas).to(DType::int32, in_dispatch);
}

/// The descriptors of all ranks, from ids, dst_row, rows and origins.
void fill_layouts(ExpertDispatch& dispatch, bool positions_given) {
  const EPConfig& config = dispatch.config;
  const std::int64_t experts = config.num_experts_per_rank();
  for (std::int32_t rank = 0; rank < config.world_size; ++rank) {
    EPAll2AllLayoutDesc desc;
    desc.num_dispatch_token_cur_rank = dispatch.rows.num_input_tokens[rank];
    desc.num_input_tokens_per_rank =
        int32_array(dispatch.rows.num_input_tokens, {config.world_size});
    desc.recv_expert_counts = int32_array(dispatch.rows.expert_counts, {experts}, rank * experts);
    desc.recv_expert_offsets =
        int32_array(dispatch.rows.expert_offsets, {experts + 1}, rank * (experts + 1));
    fill_columns(dispatch, rank, positions_given, desc);
    fill_duplicate_maps(dispatch, rank, desc);
    fill_compact_maps(dispatch, rank, desc);
    fill_slots(dispatch, rank, desc);
    dispatch.layout.push_back(std::move(desc));
  }
}

/// Counts one source's tokens.
void count_tokens(const EPConfig& config, std::int32_t source, std::span<const std::int32_t> ids,
                  ExpertTraffic& traffic) {
  const auto pair = [&](std::int64_t from, std::int64_t to) {
    return from * config.world_size + to;
  };
  TokenRoutes routes(config, source);
  for (std::int64_t i = 0; i < std::ssize(ids); ++i) {
    const TopkRoute route = routes.next(i / config.topk, ids[i]);
    if (route.rank == config.world_size) continue;
    ++traffic.rows_per_rank_pair.i64()[pair(source, route.rank)];
    if (route.to_node) {
      const std::int32_t node = route.forwarder / config.local_world_size;
      ++traffic.inter_node_tokens.i64()[std::int64_t{source} * config.num_nodes() + node];
      ++traffic.crossings.i64()[pair(source, route.forwarder)];
    }
    if (!route.to_rank) continue;
    ++traffic.unique_tokens_per_rank_pair.i64()[pair(source, route.rank)];
    if (route.rank != route.forwarder) ++traffic.crossings.i64()[pair(route.forwarder, route.rank)];
  }
}

/// Counts the rows over each link, from ids.
void fill_traffic(ExpertDispatch& dispatch) {
  const EPConfig& config = dispatch.config;
  const Shape pairs{config.world_size, config.world_size};
  const Shape nodes{config.world_size, config.num_nodes()};
  ExpertTraffic& traffic = dispatch.traffic;
  traffic = {IndexArray(pairs), IndexArray(pairs), IndexArray(nodes), IndexArray(nodes),
             IndexArray(pairs)};
  for (std::int32_t src = 0; src < config.world_size; ++src) {
    const auto& ids = dispatch.ids[src];
    count_tokens(config, src, ids, traffic);
    const auto ranges = node_send_requests(config, src, ids);
    for (std::size_t slot = 0; slot < ranges.size(); ++slot) {
      const auto plane = static_cast<std::int64_t>(slot) / config.max_tokens;
      if (plane % 2 != 0 || ranges[slot] < 0) continue;  // starts only
      ++traffic.inter_node_ranges.i64()[std::int64_t{src} * config.num_nodes() + plane / 2];
    }
  }
}

}  // namespace

ExpertDispatch simulate_expert_dispatch(const EPConfig& config, const ExpertInputs& inputs,
                                        const EPDispatchOptions& options) {
  ExpertDispatch dispatch;
  dispatch.config = config;
  dispatch.options = options;
  const std::vector<std::int64_t> positions = take_inputs(inputs, dispatch);
  if (options.spare_experts > 0) {
    dispatch.slots = take_slots(config, options, inputs.present, dispatch.ids);
    dispatch.config = slot_config(config, options);
  }
  place_all(dispatch, positions);
  allocate_outputs(dispatch);

  std::vector<std::uint8_t> payload(payload_row_bytes(config, options));
  std::vector<std::uint8_t> scales(scale_row_bytes(config, options));
  for (std::int32_t src = 0; src < config.world_size; ++src) {
    for (std::int64_t token = 0; token < inputs.tokens[src].shape[0]; ++token) {
      load_payload(dispatch, inputs, src, token, payload, scales);
      for (std::int64_t topk_slot = 0; topk_slot < config.topk; ++topk_slot) {
        require(deliver(dispatch, src, token, topk_slot, payload, scales), in_dispatch,
                ": full_scatter_indices of rank ", src, ", token ", token, ", topk slot ",
                topk_slot, " is a position that another topk slot has already");
      }
    }
  }
  fill_layouts(dispatch, !positions.empty());
  fill_traffic(dispatch);
  return dispatch;
}

}  // namespace waybill
