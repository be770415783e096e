#include <algorithm>

#include "experts/expert_executor.h"
#include "waybill/experts/ep_all2all_layer.h"

namespace waybill {

namespace {

IndexArray copied(const ConstTensorView& view) {
  return IndexArray::copy_of(view.data, view.shape, DType::int32);
}

IndexArray widened(const ConstTensorView& view) { return copied(view).to(DType::int64, "layout"); }

}  // namespace

bool EPLayout::has_weights() const { return is_given(tables_->weights()); }
ExpertTableViews EPLayout::tables() const { return tables_->views(); }
void EPLayout::note_use(Stream stream) const { tables_->routing().note_use(stream); }

std::int64_t EPLayout::num_recv_rows() const { return tables_->wait_counts()[config_.rank]; }

EPAll2AllLayoutDesc EPLayout::describe() const {
  const ExpertTableViews tables = tables_->views();
  const bool compact = options_.rows == EPRows::compact;
  EPAll2AllLayoutDesc desc;
  desc.num_dispatch_token_cur_rank = num_tokens_;
  desc.num_input_tokens_per_rank = copied(tables.num_input_tokens);
  if (!config_.is_intra_node()) desc.send_reqs_recv_tensor = copied(tables.send_reqs);
  desc.topk_indices_tensor = copied(tables.ids);
  desc.token_dst_scatter_idx = copied(tables.dst_rows);
  if (config_.is_intra_node() && !compact) {
    desc.skipped_token_mapping_indices = widened(tables.primary_rows);
    desc.skipped_token_topk_mapping_indices = widened(tables.topk_slot_rows);
  }
  desc.recv_expert_counts = copied(tables.expert_counts);
  desc.recv_expert_offsets = copied(tables.expert_offsets);
  if (compact) {
    desc.recv_topk_indices = copied(tables.recv_topk);
    desc.compact_to_grouped = copied(tables.compact_to_grouped);
    desc.grouped_to_compact = copied(tables.grouped_to_compact);
  }
  return desc;
}

}  // namespace waybill
