#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "batch_jobs.h"
#include "plan_checks.h"
#include "routes.h"

namespace waybill::detail {

/// How the rows that a hop has brought come back along it.
enum class ReturnKind : std::uint8_t {
  read,  ///< the hop's source reads the copies itself
  rows,  ///< the only copy, put as it is
  sum,   ///< one sum of all that the destination has and gets back
};

/// A batch of rows that a rank returns to the one from which it had them.
struct ReturnBatch {
  std::int32_t to = 0;
  bool network = false;        ///< `to` is on another node: it does not read, rows are put there
  bool sums = false;           ///< some of it are sums
  std::int32_t own_slot = -1;  ///< raised at the rank itself when the sums are made, before the put
  std::int32_t slot = -1;      ///< raised at `to`
};

/// What comes back along the hops of all parts: every forward batch, rank by rank, as one return
/// batch of each of its destinations.
struct GradientReturns {
  GradientReturns(std::span<const SequencePart> parts, std::span<const PartRoutes> routes,
                  std::span<const std::vector<std::int64_t>> rows_needed, const Topology& topology,
                  std::int64_t batch_bytes);

  std::vector<std::vector<ReturnKind>> kind;     ///< [parts][hops]
  std::vector<std::vector<std::int32_t>> batch;  ///< [parts][hops]; -1: read
  std::vector<std::vector<std::int32_t>> key;  ///< [parts][hops] the first copy in what it returns
  std::vector<std::vector<std::int64_t>> sum_row;   ///< [parts][hops] at dst, of the sums there
  std::vector<std::vector<std::int64_t>> land_row;  ///< [parts][hops] at src, where rows are put
  std::vector<WindowRows> rows;                     ///< [parts]
  std::vector<ReturnBatch> batches;
  std::vector<BatchJob> jobs;  ///< of the batches
  JobOrder order;
  std::int32_t num_slots = 0;

 private:
  void find_kinds(std::span<const PartRoutes> routes, const Topology& topology);
  void find_batches(std::span<const SequencePart> parts, std::span<const PartRoutes> routes,
                    const Topology& topology, std::int64_t batch_bytes);
  void take_rows(std::span<const PartRoutes> routes,
                 std::span<const std::vector<std::int64_t>> rows_needed);
  void order_batches(std::span<const PartRoutes> routes, std::int32_t world_size);
};

}  // namespace waybill::detail
