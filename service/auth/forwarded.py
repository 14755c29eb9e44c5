"""The metadata by which a gateway knows calls that another gateway of the same server forwards."""

HOP = "quire-hop"
TENANT = "quire-tenant"
