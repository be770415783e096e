#include <vector>

#include "layout_desc.h"
#include "waybill/core/at.h"

namespace waybill::detail {
namespace {

/// Counts one source's tokens: each once for a rank, and once for a node.
class SourceTraffic {
 public:
  SourceTraffic(const EPConfig& config, std::int32_t source, ExpertTraffic& traffic)
      : config_(config),
        source_(source),
        rows_(traffic.rows_per_rank_pair.i64()),
        unique_(traffic.unique_tokens_per_rank_pair.i64()),
        node_tokens_(traffic.inter_node_tokens.i64()),
        crossings_(traffic.crossings.i64()),
        last_token_(at(config.world_size), -1),
        last_token_of_node_(at(config.num_nodes()), -1) {}

  void add(std::int64_t token, std::int32_t expert) {
    const std::int32_t dst = config_.rank_of_expert(expert);
    if (dst == config_.world_size) return;
    const std::int32_t local = config_.local_world_size;
    const std::int32_t node = dst / local;
    const bool elsewhere = node != source_ / local;
    const std::int32_t hub = node * local + source_ % local;  // the source itself on its own node
    ++rows_[pair(source_, dst)];
    if (elsewhere && last_token_of_node_[at(node)] != token) {
      last_token_of_node_[at(node)] = token;
      ++node_tokens_[at(source_ * config_.num_nodes() + node)];
      ++crossings_[pair(source_, hub)];
    }
    if (last_token_[at(dst)] == token) return;
    last_token_[at(dst)] = token;
    ++unique_[pair(source_, dst)];
    if (dst != hub) ++crossings_[pair(hub, dst)];
  }

 private:
  [[nodiscard]] std::size_t pair(std::int64_t from, std::int64_t to) const {
    return at(from * config_.world_size + to);
  }

  const EPConfig& config_;
  std::int32_t source_;
  std::span<std::int64_t> rows_;
  std::span<std::int64_t> unique_;
  std::span<std::int64_t> node_tokens_;
  std::span<std::int64_t> crossings_;
  std::vector<std::int64_t> last_token_;
  std::vector<std::int64_t> last_token_of_node_;
};

}  // namespace

void fill_traffic(ExpertDispatch& dispatch) {
  const EPConfig& config = dispatch.config;
  const Shape pairs{config.world_size, config.world_size};
  const Shape nodes{config.world_size, config.num_nodes()};
  ExpertTraffic& traffic = dispatch.traffic;
  traffic = {IndexArray(pairs), IndexArray(pairs), IndexArray(nodes), IndexArray(nodes),
             IndexArray(pairs)};
  for (std::int32_t src = 0; src < config.world_size; ++src) {
    const auto& ids = dispatch.ids[at(src)];
    SourceTraffic counter(config, src, traffic);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      counter.add(static_cast<std::int64_t>(i) / config.topk, ids[i]);
    }
    const auto ranges = node_send_requests(config, src, ids);
    for (std::size_t slot = 0; slot < ranges.size(); ++slot) {
      const auto plane = static_cast<std::int64_t>(slot) / config.max_tokens;
      if (plane % 2 != 0 || ranges[slot] < 0) continue;  // starts only
      ++traffic.inter_node_ranges.i64()[at(std::int64_t{src} * config.num_nodes() + plane / 2)];
    }
  }
}

}  // namespace waybill::detail
