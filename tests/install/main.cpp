// Routes four shards between two ranks with the installed library.
#include <iostream>

#include "waybill/core/error.h"
#include "waybill/core/index_array.h"
#include "waybill/routing/compute_metadata.h"

int main() {
  const waybill::IndexArray seq_len({2, 2}, {3, 1, 2, 2});
  const waybill::IndexArray dst_rank({2, 2}, {0, 1, 1, 0});
  const waybill::DispatchMetadata metadata = waybill::compute_metadata(seq_len, dst_rank);
  std::cout << metadata.fwd;

  try {
    (void)waybill::compute_metadata(seq_len, waybill::IndexArray({2, 2}, {0, 1, 7, 0}));
  } catch (const waybill::InvalidArgument& error) {
    std::cout << "as it should, rank 7 is an error: " << error.what() << "\n";
    return 0;
  }
  std::cerr << "rank 7 of 2 was accepted\n";
  return 1;
}
