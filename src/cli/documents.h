#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "options.h"

namespace waybill::cli {

/// Document lengths that fit a plan, and how they came about.
struct Documents {
  std::vector<std::int64_t> lengths;
  std::string origin;                ///< one line
  std::vector<std::string> remarks;  ///< which were skipped, cut, left out; which rows stay empty
  PlannerOptions plan;               ///< with tokens_per_rank decided
};

/// Reads or draws the documents and fits them into the ranks.
/// @throws UsageError for options that do not go together, and where the ranks have no room for all
/// tokens unless options.cut; IoError for a file that cannot be read.
[[nodiscard]] Documents load_documents(const Options& options);

/// The rule by which --corpus counts tokens, for --help and reports.
[[nodiscard]] std::string corpus_rule();

}  // namespace waybill::cli
