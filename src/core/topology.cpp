#include "waybill/core/topology.h"

#include <ostream>

namespace waybill {

std::ostream& operator<<(std::ostream& out, Rank rank) { return out << to_int(rank); }

}  // namespace waybill
