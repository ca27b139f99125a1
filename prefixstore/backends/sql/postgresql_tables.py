"""Whether the tables of a PostgreSQL store belong to a role that is trusted.

Another role may have created tables of these names first. Whoever owns a table sees what is stored, may change it, and
may have code run with the rights of its user. So the server's catalogs are asked before anything is read from a table.
All names are qualified with ``pg_catalog``, so no other schema can provide a function.
"""

from __future__ import annotations

from typing import Any

import psycopg

from prefixstore.backends.sql.database import TABLES
from prefixstore.backends.sql.migrations import VERSION_TABLE
from prefixstore.errors import IncompatibleError

__all__ = ["SET_SEARCH_PATH", "our_tables"]

_NAMED = ", ".join(f"'{name}'" for name in (*TABLES, VERSION_TABLE))

# Sent on each new connection. The schema is the first of the search path that has one of the tables, or the first one
# if none has. The server looks into pg_catalog before it; temporary tables come last, or they would hide those of the
# store.
SET_SEARCH_PATH = f"""
SELECT pg_catalog.set_config('search_path', pg_catalog.concat_ws(', ', (
    SELECT pg_catalog.quote_ident(path.name)
    FROM pg_catalog.unnest(pg_catalog.current_schemas(false)) WITH ORDINALITY AS path (name, place)
    WHERE path.name <> 'pg_catalog'
    ORDER BY NOT EXISTS (
        SELECT FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
        WHERE n.nspname = path.name AND c.relname IN ({_NAMED})
    ), path.place
    LIMIT 1
), 'pg_temp'), false)
"""  # noqa: S608 - constants

# The tables of the schema that is on the search path: name, owner, and whether that owner is trusted: who could change
# them anyway, of whose role this one is a member (but a superuser is one of every role), or who owns a schema that was
# named. "$user", which is used unless another is named, may have been created by anyone.
_TABLES = f"""
SELECT c.relname::pg_catalog.text, owner.rolname::pg_catalog.text,
    owner.rolsuper OR c.relowner IN (me.oid, d.datdba)
        OR (NOT me.rolsuper AND pg_catalog.pg_has_role(me.oid, c.relowner, 'MEMBER'))
        OR (c.relowner = n.nspowner AND n.nspname <> me.rolname)
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_roles AS owner ON owner.oid = c.relowner
JOIN pg_catalog.pg_roles AS me ON me.rolname = current_user
JOIN pg_catalog.pg_database AS d ON d.datname = pg_catalog.current_database()
WHERE n.nspname = ANY (pg_catalog.current_schemas(false)) AND c.relname IN ({_NAMED})
"""  # noqa: S608 - constants


def our_tables(driver: psycopg.Connection[Any], where: str) -> list[str]:
    """The names of our tables that there are.

    Raises
    ------
    IncompatibleError
        If one has an owner who need not be trusted. Nothing has been read from it.
    """
    found = driver.execute(_TABLES).fetchall()
    for name, owner, is_trusted in found:
        if not is_trusted:
            raise IncompatibleError(
                f"{where}: the table {name} belongs to the role {owner}, which could change what is stored; if that "
                "role is trusted, make it the owner of the schema or of the database, else choose another database or "
                "schema"
            )
    return [name for name, _, _ in found]
