"""Published tables as PyTorch modules: quantized, shared by all processes of the host, live.

`tableside.torch` names what users import. Imports go one way:

    errors  <-  source  <-  published  <-  inputs  <-  lookups  <-  keyed  <-  dispatch  <-  operators  <-  embeddings  <-  swap

`pending` and `missing` lie before `published`, which has one of each; `tracers` lies before `inputs`,
and `padding` before `dispatch`.
"""
