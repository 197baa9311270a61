"""Published tables as PyTorch modules: quantized, shared by all processes of the host, live.
`tableside.torch` names what users import. Imports go one way:

    inputs <- pending <- published <- lookups, device <- dispatch <- embeddings <- swap
"""
