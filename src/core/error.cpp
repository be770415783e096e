#include "waybill/core/error.h"

#include <iomanip>
#include <sstream>
#include <utility>

#include "core/printable.h"

namespace waybill {

void TextPart::write_integer(std::ostream& out, const TextPart& part) {
  out << part.content_.integer;
}
void TextPart::write_natural(std::ostream& out, const TextPart& part) {
  out << part.content_.natural;
}
void TextPart::write_real(std::ostream& out, const TextPart& part) { out << part.content_.real; }
void TextPart::write_character(std::ostream& out, const TextPart& part) {
  out << static_cast<char>(part.content_.natural);
}
void TextPart::write_text(std::ostream& out, const TextPart& part) {
  out.write(static_cast<const char*>(part.content_.object),
            static_cast<std::streamsize>(part.size_));
}

std::string detail::join_parts(std::initializer_list<TextPart> parts) {
  std::ostringstream text;
  for (const TextPart& part : parts) part.write(text);
  return std::move(text).str();
}

namespace {

std::string describe(const TimeoutInfo& missed) {
  std::ostringstream text;
  text << missed.operation << ": rank " << missed.rank << " waited " << std::fixed
       << std::setprecision(missed.seconds < 1 ? 3 : 1) << missed.seconds << " s for "
       << missed.what << " >= " << missed.wanted << " from rank " << missed.peer;
  if (missed.peer_node >= 0) {
    text << " (node " << missed.peer_node << ", local_rank " << missed.peer_local << ")";
  }
  text << "; last seen " << missed.seen;
  if (missed.in_call) {
    text << "; ranks may be in different calls, or rank " << missed.peer
         << " caught an error of this one";
  }
  return text.str();
}

}  // namespace

void detail::throw_parts(std::initializer_list<TextPart> parts) {
  throw InvalidArgument(detail::join_parts(parts));
}

Error::Error(const std::string& text) : std::runtime_error(printable(text)) {}

IoError::IoError(const std::string& text) : Error(printable_line(text)) {}

Timeout::Timeout(TimeoutInfo missed) : Error(describe(missed)), missed_(std::move(missed)) {}

}  // namespace waybill
