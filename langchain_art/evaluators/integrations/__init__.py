"""Evaluators as other tools call them: thin, all over `GroupEvaluator`."""
