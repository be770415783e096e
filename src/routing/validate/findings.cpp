#include "findings.h"

#include <ostream>

namespace waybill {

std::string_view to_string(FindingKind kind) {
  switch (kind) {
    case FindingKind::shape:
      return "shape";
    case FindingKind::padding:
      return "padding";
    case FindingKind::rank_range:
      return "rank_range";
    case FindingKind::negative:
      return "negative";
    case FindingKind::bounds:
      return "bounds";
    case FindingKind::capacity:
      return "capacity";
    case FindingKind::overlap:
      return "overlap";
    case FindingKind::coverage:
      return "coverage";
    case FindingKind::undispatched:
      return "undispatched";
    case FindingKind::order:
      return "order";
    case FindingKind::count:
      return "count";
    case FindingKind::transpose:
      return "transpose";
    case FindingKind::identity:
      return "identity";
    case FindingKind::plan:
      return "plan";
    case FindingKind::document:
      return "document";
    case FindingKind::causality:
      return "causality";
    case FindingKind::attention:
      return "attention";
    case FindingKind::mask:
      return "mask";
    case FindingKind::normalization:
      return "normalization";
  }
  return "unknown";
}

std::string to_string(const Finding& finding) {
  std::string place;
  const auto append = [&](const char* what, std::int64_t idx) {
    if (idx >= 0) place += concat(place.empty() ? " " : ", ", what, " ", idx);
  };
  append("rank", finding.rank);
  append("shard", finding.shard);
  append("copy", finding.copy);
  if (!place.empty()) place += ":";
  return concat(finding.table, ".", finding.field, ":", place, " got ", finding.got, ", expected ",
                finding.expected, " (", to_string(finding.kind), ")");
}

std::ostream& operator<<(std::ostream& out, const Finding& finding) {
  return out << to_string(finding);
}

}  // namespace waybill
