#include "waybill/core/text_part.h"

#include <sstream>

namespace waybill {

void TextPart::write(std::ostream& out) const {
  switch (kind_) {
    case Kind::integer:
      out << content_.integer;
      return;
    case Kind::natural:
      out << content_.natural;
      return;
    case Kind::real:
      out << content_.real;
      return;
    case Kind::character:
      out << content_.character;
      return;
    case Kind::text:
      out.write(content_.text.data, static_cast<std::streamsize>(content_.text.size));
      return;
    case Kind::object:
      content_.object.write(out, content_.object.value);
      return;
  }
}

std::string detail::join_parts(std::initializer_list<TextPart> parts) {
  std::ostringstream text;
  for (const TextPart& part : parts) part.write(text);
  return std::move(text).str();
}

}  // namespace waybill
