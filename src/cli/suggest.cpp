#include "suggest.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace waybill::cli {
namespace {

/// Letters to insert, delete, replace or exchange with their neighbour.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> cost(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  std::iota(cost[0].begin(), cost[0].end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    cost[i][0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t other = a[i - 1] == b[j - 1] ? 0 : 1;
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + other});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
    }
  }
  return cost[a.size()][b.size()];
}

std::string_view without_dashes(std::string_view word) {
  word.remove_prefix(std::min(word.find_first_not_of('-'), word.size()));
  return word;
}

/// Where the text of a line begins: behind the last gap of two or more spaces, or its indentation.
std::size_t text_column(std::string_view line) {
  std::size_t column = std::min(line.find_first_not_of(' '), line.size());
  const std::size_t gap = line.find("  ", column);
  if (gap != std::string_view::npos) column = line.find_first_not_of(' ', gap);
  return std::min(column, line.size());
}

}  // namespace

std::string did_you_mean(std::string_view word, std::span<const std::string> known) {
  const std::string_view bare = without_dashes(word);
  if (bare.empty() || bare.size() > 60) return "";
  const std::string* best = nullptr;
  std::size_t least = std::max<std::size_t>(1, bare.size() / 3) + 1;
  for (const std::string& candidate : known) {
    const std::string_view name = without_dashes(candidate);
    std::size_t far = distance(bare, name);
    const bool begins = bare.size() >= 3 && name.starts_with(bare);
    if (begins) far = std::min<std::size_t>(far, 1);
    if (far >= least) continue;
    least = far;
    best = &candidate;
  }
  return best == nullptr ? "" : ", did you mean " + *best + "?";
}

std::string wrapped_help(std::string_view text, std::size_t width) {
  std::string result;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.empty() && result.ends_with("\n\n")) continue;
    const std::size_t hanging = text_column(line);
    const std::size_t indent = hanging + 20 < width ? hanging : std::min<std::size_t>(4, width / 4);
    std::size_t least = hanging;  // no break before the text
    for (std::size_t room = width; line.size() > room; room = width - indent, least = 0) {
      std::size_t cut = line.rfind(' ', room);
      if (cut == std::string_view::npos || cut <= least) cut = line.find(' ', room);
      if (cut == std::string_view::npos) break;
      result += line.substr(0, cut);
      result += '\n';
      result.append(indent, ' ');
      line.remove_prefix(cut + 1);
    }
    result += line;
    result += '\n';
  }
  return result;
}

}  // namespace waybill::cli
