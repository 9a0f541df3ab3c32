"""The list of mutants fits the code; ``python -m tests.mutants`` tries them."""

import ast

from tests.mutants import ROOT, all_mutants


def test_each_mutant_is_another_program_and_names_its_tests() -> None:
    for mutant in all_mutants():
        original, mutated = (ROOT / mutant.file).read_text(), mutant.applied(ROOT)
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(original)), mutant.name
        for path, _, test in (test.partition("::") for test in mutant.tests):
            assert (ROOT / path).exists(), (mutant.name, path)
            assert not test or f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), test
