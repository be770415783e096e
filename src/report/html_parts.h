#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "waybill/report/html_report.h"

namespace waybill::detail {

/// Text for use between tags and in quoted attributes. Control characters, those that turn the
/// direction of writing and what is no UTF-8 become U+FFFD.
[[nodiscard]] std::string html_escape(std::string_view text);

/// A number for an SVG attribute: at most two digits after the point, no trailing zeros.
[[nodiscard]] std::string svg_number(double value);

/// Ranks drawn as one where a world is too large for a drawing: blocks of equal size, the last may
/// be smaller.
struct RankBlocks {
  std::int32_t world_size = 1;
  std::int32_t ranks_per_block = 1;

  /// At most `max_blocks` blocks.
  [[nodiscard]] static RankBlocks make(std::int32_t world_size, std::int32_t max_blocks);

  [[nodiscard]] std::int32_t count() const {
    return (world_size + ranks_per_block - 1) / ranks_per_block;
  }
  [[nodiscard]] std::int32_t first(std::int32_t block) const { return block * ranks_per_block; }
  [[nodiscard]] std::int32_t last(std::int32_t block) const {
    const std::int32_t end = (block + 1) * ranks_per_block;
    return (end < world_size ? end : world_size) - 1;
  }
  /// "rank 3", "ranks 4-7"
  [[nodiscard]] std::string name(std::int32_t block) const;
};

/// Fill of everything that stands for a rank.
[[nodiscard]] std::string rank_colour(std::int32_t rank, std::int32_t world_size);

/// One figure at the top of a page.
[[nodiscard]] std::string card(std::string_view label, const std::string& value,
                               const std::string& remark);

inline constexpr double load_width = 340;
inline constexpr double load_height = 120;

/// A picture with a bar for each block of ranks: caption, bars, a dashed line for the mean, and the
/// ranks below.
/// @param most the largest value, as the caption shows it
/// @param bars elements between y = 0 and load_height, where they stand
/// @param mean_height below 0: no line
[[nodiscard]] std::string load_figure(std::string_view title, const Spread& spread,
                                      const std::string& most, const RankBlocks& blocks,
                                      const std::string& bars, double mean_height);

/// The sections of the page, each a complete <section> element.
[[nodiscard]] std::string matrix_section(const PlanSummary& summary);
[[nodiscard]] std::string loads_section(const PlanSummary& summary);
[[nodiscard]] std::string documents_section(const QkvPlan& plan, std::int64_t max_documents);
[[nodiscard]] std::string table_section(const PlanSummary& summary);

/// The lines of step_table below its names: a label, and a cell for each prediction.
[[nodiscard]] std::vector<std::pair<std::string, std::vector<std::string>>> step_figures(
    std::span<const NamedStep> steps);

/// Predictions: their figures side by side, what their names mean, and timelines one below the
/// other on one scale; nothing for none.
[[nodiscard]] std::string timeline_section(const std::vector<NamedStep>& steps);

[[nodiscard]] std::string meaning_section(const std::vector<std::string>& sentences);
[[nodiscard]] std::string input_section(const ReportContext& context);

/// A whole page of these sections, with style sheet and footer.
[[nodiscard]] std::string page_of(const std::string& title, const std::string& sections);

/// The page's style sheet.
[[nodiscard]] std::string_view html_style();

}  // namespace waybill::detail
