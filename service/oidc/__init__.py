"""Sign-in of people with tokens of an OpenID Connect issuer, besides API keys.

``section`` is the section of the stack file; ``tokens`` verifies tokens, and maps the groups in them to projects.
"""
