#include "html_parts.h"

#include <algorithm>
#include <array>

#include "core/printable.h"
#include "report/format.h"
#include "waybill/core/error.h"

namespace waybill::detail {
std::string html_escape(std::string_view text) {
  constexpr std::string_view special = "&<>\"'";
  constexpr std::string_view names[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
  std::string result;
  while (!text.empty()) {
    const auto [code_point, length] = first_code_point(text);
    const char lead = text.front();
    if (length == 0 || (is_control(code_point) && lead != '\n' && lead != '\t')) {
      result += "\uFFFD";
    } else {
      const std::size_t at = special.find(lead);
      result += at == special.npos ? text.substr(0, length) : names[at];
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return result;
}

std::string svg_number(double value) {
  std::string text = format_fixed(value, 2);
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

RankBlocks RankBlocks::make(std::int32_t world_size, std::int32_t max_blocks) {
  return {.world_size = world_size, .ranks_per_block = (world_size + max_blocks - 1) / max_blocks};
}

std::string RankBlocks::name(std::int32_t block) const {
  if (first(block) == last(block)) return concat("rank ", first(block));
  return concat("ranks ", first(block), "\u2013", last(block));
}

std::string rank_colour(std::int32_t rank, std::int32_t world_size) {
  // Neighbours that share a document are often next to each other: they differ in lightness too.
  const std::int32_t hue = static_cast<std::int32_t>((rank * std::int64_t{360}) / world_size);
  static constexpr std::array<std::int32_t, 3> lightness = {46, 60, 38};
  const std::int32_t light = world_size <= 12 ? (rank % 2 == 0 ? 46 : 60) : lightness[rank % 3];
  return concat("hsl(", (hue + 172) % 360, " 52% ", light, "%)");
}

std::string card(std::string_view label, const std::string& value, const std::string& remark) {
  return concat("<div><dt>", label, "</dt><dd>", value, "<small>", remark, "</small></dd></div>\n");
}

std::string load_figure(std::string_view title, const Spread& spread, const std::string& most,
                        const RankBlocks& blocks, const std::string& bars, double mean_height) {
  std::string text =
      concat("<figure><figcaption><b>", title, "</b> most: rank ", spread.max_rank, ", ", most,
             ", ", format_fixed(spread.imbalance(), 3),
             " \u00D7 the mean</figcaption>\n<svg class=\"load\" viewBox=\"-6 -4 ", load_width + 12,
             " ", load_height + 24, "\" role=\"img\" aria-label=\"", title, " by rank\">\n", bars);
  const auto line = [&](std::string_view css_class, const std::string& y) {
    text += concat("<line class=\"", css_class, "\" x1=\"-4\" x2=\"", load_width + 4, "\" y1=\"", y,
                   "\" y2=\"", y, "\"/>\n");
  };
  if (mean_height >= 0) line("mean", svg_number(load_height - mean_height));
  line("base", svg_number(load_height));
  const double step = load_width / blocks.count();
  const std::int32_t stride = std::max(1, (blocks.count() + 7) / 8);
  for (std::int32_t block = 0; block < blocks.count(); block += stride) {
    text += concat("<text x=\"", svg_number((block + 0.5) * step), "\" y=\"", load_height + 15,
                   "\" text-anchor=\"middle\">", blocks.first(block), "</text>");
  }
  return text + "\n</svg></figure>\n";
}

std::string_view html_style() {
  static constexpr std::string_view style = R"css(
:root{color-scheme:light dark;
--paper:#f5f3ee;--card:#fffdf9;--ink:#1d2327;--soft:#5d666d;--line:#dcd6ca;
--accent:#0f766e;--good:#15803d;--bad:#b91c1c;
--work:#0f766e;--in:#2563a8;--out:#c2701c;
--h0:#f1eee7;--h1:#dcefe9;--h2:#bfe2da;--h3:#9dd3c9;--h4:#78c1b6;--h5:#53aca2;
--h6:#33958d;--h7:#1c7c76;--h8:#11625e;--h9:#0a4745}
@media (prefers-color-scheme:dark){:root{
--paper:#12171a;--card:#1a2125;--ink:#e7ecee;--soft:#9aa7ae;--line:#313b41;
--accent:#4fd1c1;--good:#5fd38a;--bad:#ff8b85;
--work:#35b3a5;--in:#5b9be0;--out:#e09a4b;
--h0:#20292d;--h1:#173b3b;--h2:#17504d;--h3:#17665f;--h4:#1a7d73;--h5:#239689;
--h6:#36af9f;--h7:#57c8b6;--h8:#86decd;--h9:#c4f4e8}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:20px 16px 48px}
header,section{background:var(--card);border:1px solid var(--line);border-radius:12px;
padding:18px 20px;margin:0 0 16px;min-width:0}
header{border-top:5px solid var(--accent)}
h1{font-size:1.6rem;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:0 0 6px}
p{margin:0 0 10px}
.sub,.note{color:var(--soft)}.note{font-size:.88rem}
.row{display:flex;flex-wrap:wrap;gap:8px 16px;align-items:center;justify-content:space-between}
.badge{border:1.5px solid currentColor;border-radius:99px;padding:2px 13px;font-weight:600;
font-size:.9rem;white-space:nowrap}
.passed{color:var(--good)}.failed{color:var(--bad)}.not_run{color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));
border-top:1px dashed var(--line);margin-top:14px;padding-top:4px}
.cards div{padding:10px 12px 4px 0}
.cards dt,dl.cards dt{font-size:.74rem;letter-spacing:.05em;text-transform:uppercase;
color:var(--soft)}
.cards dd{margin:0;font-size:1.42rem;font-weight:650;line-height:1.25;
font-variant-numeric:tabular-nums}
.cards small{display:block;font-size:.8rem;font-weight:400;color:var(--soft)}
.two{display:grid;grid-template-columns:minmax(0,1fr);gap:0 16px}
@media (min-width:860px){.two{grid-template-columns:minmax(0,11fr) minmax(0,10fr)}}
ul{margin:0;padding:0 0 0 1.1em}li{margin:0 0 6px;overflow-wrap:anywhere}
.checks{list-style:none;padding:0}.checks li{display:grid;grid-template-columns:1.5em minmax(0,1fr);overflow-wrap:anywhere}
.checks b{font-weight:600}.checks small{display:block;color:var(--soft)}
.facts{display:grid;grid-template-columns:auto 1fr;gap:2px 14px;margin:0;font-size:.92rem}
.facts dt{color:var(--soft)}.facts dd{margin:0;overflow-wrap:anywhere}
pre{margin:12px 0 0;padding:10px 12px;border-radius:8px;background:var(--paper);
border:1px solid var(--line);white-space:pre-wrap;overflow-wrap:anywhere;
font:.84rem/1.45 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
svg text{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}
svg .axis{font-size:13px;fill:var(--ink)}
.heat{display:block;width:100%;max-width:600px;margin:0 auto}
.home{fill:none;stroke:var(--line);stroke-width:1}
.h0{fill:var(--h0)}.h1{fill:var(--h1)}.h2{fill:var(--h2)}.h3{fill:var(--h3)}.h4{fill:var(--h4)}
.h5{fill:var(--h5)}.h6{fill:var(--h6)}.h7{fill:var(--h7)}.h8{fill:var(--h8)}.h9{fill:var(--h9)}
.legend{display:flex;flex-wrap:wrap;gap:10px;align-items:center;justify-content:center;font-size:.85rem;
color:var(--soft);margin:8px 0}
.ramp{width:140px;height:12px;border-radius:3px}
.loads{display:grid;grid-template-columns:repeat(auto-fit,minmax(270px,1fr));gap:14px 26px}
figure{margin:0}figcaption{font-size:.84rem;color:var(--soft)}
figcaption b{display:block;color:var(--ink);font-size:.95rem}
.load{display:block;width:100%;max-width:520px}
.work{fill:var(--work)}.in{fill:var(--in)}.out{fill:var(--out)}
.load rect{opacity:.72}.load rect.top{opacity:1}
.load rect:hover,.time rect:hover,.heat rect:hover,.doc rect:hover{opacity:1;stroke:var(--ink);stroke-width:1.2}
.time{display:block;width:100%}.chip.time{width:30px;display:inline-block}
.key{display:inline-flex;gap:5px;align-items:center;white-space:nowrap;margin-right:8px}
.p0{fill:#2563a8}.p1{fill:#0f766e}.p2{fill:#7ba7d9}.p3{fill:#c2701c}.p4{fill:#3b5b52}
.p5{fill:#e0a25f}.p6{fill:#9a3f6b}
.mean{stroke:var(--ink);stroke-dasharray:5 4;opacity:.75}.base{stroke:var(--line)}
.chips{display:flex;flex-wrap:wrap;gap:4px;align-items:center;font-size:.85rem;
color:var(--soft)}
.chip{width:30px;height:18px}.chip text,.doc text{fill:#fff;font-size:11px;font-weight:600;
pointer-events:none;paint-order:stroke;stroke:rgba(0,0,0,.4);stroke-width:1.6px}
.doc{display:grid;grid-template-columns:3.6em 4.9em minmax(0,1fr);gap:10px;align-items:center;
margin:0 0 5px;font-size:.86rem;font-variant-numeric:tabular-nums}
.doc .name{color:var(--soft)}.doc .num{text-align:right}
.doc svg{width:100%;height:24px;overflow:visible}
.doc rect{stroke:var(--card);stroke-width:.8}
@media (max-width:860px){.time text{font-size:20px}}
@media (max-width:560px){.time text{font-size:30px}.time .second{display:none}
.doc{grid-template-columns:2.9em 5.2em minmax(0,1fr);gap:6px;font-size:.78rem}
.doc text{display:none}header,section{padding:14px}.heat text{font-size:17px}
.heat .axis{font-size:19px}.heat .second{display:none}.badge{white-space:normal}
main{padding:10px 8px 32px}h1{font-size:1.3rem}.facts{grid-template-columns:1fr}
.facts dd{margin:0 0 6px}.cards{grid-template-columns:repeat(auto-fit,minmax(124px,1fr))}}
summary{cursor:pointer;font-weight:600}
.scroll{overflow-x:auto;margin-top:10px}
table{border-collapse:collapse;font-size:.82rem;font-variant-numeric:tabular-nums}
th,td{padding:3px 9px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
thead th{color:var(--soft);font-weight:600}
footer{color:var(--soft);font-size:.84rem;text-align:center}
@media print{body{background:#fff}header,section{break-inside:avoid}}
)css";
  return style;
}

}  // namespace waybill::detail
