"""A model that follows rules, inside of the real engine, behind the real server.

Graphs have to be led through their branches, and LangChain's own tests want sensible answers; no
model of our size gives either. So a rule (`rules`) says what each reply is to be, and the engine
(`engine`) draws those tokens instead of random ones. All else is real: the chat template, the
tokenizer, the forward pass, the adapter, the logprobs (of the real, small model, under the
distribution that would have been sampled), streaming, tool-call parsing, grammars.
"""
