"""The page's style sheet: one column, few lines, the same sheet for a phone, a screen and paper."""

from __future__ import annotations

from mosaic.retrain.page.colors import HUES, variables

_SHEET = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
main,footer{max-width:60rem;margin:0 auto;padding:0 1.5rem}
header{padding:2.5rem 0 1rem}
h1{margin:.25rem 0 .5rem;font-size:2.5rem;line-height:1.15;letter-spacing:-.01em}
h1 small{font-size:1.125rem;font-weight:400;letter-spacing:0;color:var(--ink);display:block;margin-top:.25rem}
h2{margin:0 0 .5rem;font-size:1.125rem}
p{margin:0 0 .5rem}
small,.faint,dt,th,footer,summary{color:var(--faint)}
small{display:block;font-size:.8125rem;font-weight:400;line-height:1.35}
.reason{font-size:1.125rem}
.todo{background:var(--panel);border-left:4px solid var(--ink);padding:.75rem 1rem;border-radius:2px}
section{border-top:1px solid var(--line);padding:1.5rem 0}
a{color:inherit}
code,.plan{font:.875rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.plan{white-space:pre-wrap}
footer{padding-bottom:2rem;font-size:.875rem}
.unseen{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
svg{display:block;width:100%}
table{width:100%;border-collapse:collapse;margin:.5rem 0}
th,td{text-align:left;vertical-align:middle;padding:.375rem .75rem .375rem 0;font-weight:400}
thead th{font-size:.8125rem}
tbody th{color:var(--ink)}
td:last-child,th:last-child{padding-right:0}
.number,.counts th+th{text-align:right;white-space:nowrap}
.forest tbody tr,.counts tbody tr{border-top:1px solid var(--line)}
.forest{table-layout:fixed}
.forest thead th{width:15%}.forest thead th:first-child{width:23%}.forest thead th:nth-child(2){width:33%}
.forest th:nth-child(3),.forest th:nth-child(4){text-align:right}
.forest th:last-child,.result{padding-left:1rem}
.forest .plot{padding-top:0;padding-bottom:0}
.failed .result,.bad strong{color:var(--bad);font-weight:600}
.plot rect{fill:var(--wash)}
.zero{stroke:var(--line);stroke-width:1.5}
.limit{stroke:var(--ink);stroke-width:2}
.range{stroke:var(--mark);stroke-width:2;fill:none}
.usual{stroke:var(--line);stroke-width:8}
circle{fill:var(--mark)}
.failed .range{stroke:var(--bad)}.failed circle{fill:var(--bad)}
.aside .range{stroke:var(--faint)}.aside circle{fill:var(--paper);stroke:var(--faint);stroke-width:1.5}
ul,ol{margin:.25rem 0 .5rem;padding-left:1.25rem}
.findings,.plain,.days{list-style:none;padding:0}
.findings .bad{background:var(--bad-wash);padding:.5rem .75rem;margin:.25rem 0;border-radius:2px}
details{margin:.5rem 0}
summary{cursor:pointer;padding:.25rem 0}
.days{display:grid;grid-template-columns:repeat(30,1fr);gap:3px;margin:0 0 .25rem}
.days li,.key b{border-radius:3px;font-size:.75rem;font-weight:600;text-align:center}
.days li{aspect-ratio:1;display:grid;place-items:center;position:relative}
.days .none{color:var(--faint);background:var(--panel)}
.key b{display:inline-block;width:1.25rem;line-height:1.25rem}
.key span{display:inline-block;margin-right:1rem}
.ends{display:flex;justify-content:space-between;font-size:.8125rem}
figure{margin:1rem 0 0}
.chart line{stroke:var(--mark);stroke-width:2;stroke-linecap:round}
dl{margin:0}
dl div{display:grid;grid-template-columns:9rem 1fr;gap:0 1rem;padding:.25rem 0}
dd{margin:0;min-width:0}
dd ol,dd details,dd summary{margin:0;padding:0}
@media (max-width:46rem){
main,footer{padding:0 1rem}
header{padding-top:1.5rem}
h1{font-size:2rem}
.days{grid-template-columns:repeat(10,1fr)}
.forest thead{display:none}
.forest tbody tr{display:grid;grid-template-columns:1fr auto;padding:.5rem 0;align-items:start}
.forest tbody th,.forest td{padding:0;width:auto}
.forest .plot{grid-area:2/1/3/3;padding:.25rem 0}
.forest .result{grid-area:1/2;text-align:right;padding-left:.75rem}
.counts,.forest{table-layout:auto}
.forest .number{grid-row:3;text-align:left}
.forest .number+.number{text-align:right}
.today::before{content:"today "}.before::before{content:"usual "}
.counts tr{display:grid;grid-template-columns:repeat(3,1fr)}
.counts thead th:first-child{position:absolute;clip-path:inset(50%)}
.counts tbody th{grid-column:1/-1;padding-bottom:0}
.counts td:nth-child(2),.counts th:nth-child(2){text-align:left}
dl div{grid-template-columns:1fr}
}
@media print{
body{font-size:11pt}
section,tr{break-inside:avoid}
details::details-content{content-visibility:visible;block-size:auto;opacity:1}
.days li,.key b,.plot rect,.todo{print-color-adjust:exact;-webkit-print-color-adjust:exact}
}
"""


def style_sheet() -> str:
    """Returns the sheet, with the colours of both schemes; paper is always light."""
    marks = "".join(
        f"h1.{name}{{color:var(--{name})}}.days .{name},.key .{name}"
        f"{{background:var(--{name}-square);color:var(--{name}-letter)}}"
        for name in HUES
    )
    return (
        f":root{{color-scheme:light dark;{_declared(dark=False)}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{_declared(dark=True)}}}}}{_SHEET}{marks}"
    ).replace("\n", "")


def _declared(*, dark: bool) -> str:
    return "".join(f"--{name}:{color};" for name, color in variables(dark=dark).items())
