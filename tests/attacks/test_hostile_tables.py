"""PostgreSQL tables of a role that need not be trusted are refused before anything is read from them."""

from __future__ import annotations

from contextlib import closing

from sqlalchemy import make_url

from prefixstore.backends.sql import migrations
from prefixstore.engine.pages import open_pages
from tests.support import ROOT
from tests.support.engines import MIB, A, B, Store, store_of
from tests.support.places import refusal
from tests.support.postgres import as_administrator, role


def test_tables_of_a_role_that_need_not_be_trusted_are_refused_unread(new_database):
    """It would see every prompt, and could answer with states of its own."""
    url = new_database(empty=True)
    with role(url, "pfxs_mallory") as mallory:
        as_administrator(url, "GRANT CREATE ON SCHEMA public TO pfxs_mallory")
        # a function in a view runs with the rights of whoever reads the view
        as_administrator(
            mallory,
            "CREATE FUNCTION seen() RETURNS varchar LANGUAGE plpgsql AS $$ BEGIN RAISE 'it ran'; END $$",
            "CREATE VIEW prefixstore_meta AS SELECT seen() AS magic",
            "CREATE TABLE prefixstore_schema (version_num varchar(32) PRIMARY KEY)",
            "GRANT ALL ON prefixstore_meta, prefixstore_schema TO PUBLIC",
        )
        assert "belongs to the role pfxs_mallory" in refusal(url)
        as_administrator(mallory, "DROP VIEW prefixstore_meta", "DROP TABLE prefixstore_schema")
        # or they are perfect
        migrations.upgrade(mallory)
        as_administrator(mallory, "GRANT ALL ON ALL TABLES IN SCHEMA public TO PUBLIC")
        with role(url, "pfxs_alice") as alice:
            for one in (url, alice):
                assert "belongs to the role pfxs_mallory" in refusal(one)
        # she may use her own
        assert refusal(mallory) == "opened"


def test_a_schema_that_another_role_made_for_us_is_refused(new_database):
    url = new_database(empty=True)
    with role(url, "pfxs_alice") as alice, role(url, "pfxs_mallory") as mallory:
        # the first schema of the search path has the name of the user, and need not be the user's
        as_administrator(url, f"GRANT CREATE ON DATABASE {make_url(url).database} TO pfxs_mallory")
        as_administrator(mallory, "CREATE SCHEMA pfxs_alice", "GRANT USAGE ON SCHEMA pfxs_alice TO PUBLIC")
        migrations.upgrade(mallory + "&options=-csearch_path%3Dpfxs_alice")
        as_administrator(mallory, "GRANT ALL ON ALL TABLES IN SCHEMA pfxs_alice TO PUBLIC")
        assert "belongs to the role pfxs_mallory" in refusal(alice)


def test_temporary_tables_do_not_hide_ours(new_database):
    """A pooler may hand us a session in which another client has created some."""
    url = new_database()
    with store_of(open_pages(url, max_bytes=64 * MIB)) as store:
        store.put(A)
        with store.backend.rows.connection() as connection:
            for name in ("meta", "rows", "payloads"):
                connection.execute(
                    f"CREATE TEMPORARY TABLE prefixstore_{name} AS SELECT * FROM public.prefixstore_{name} LIMIT 0"
                )
        assert store.fetch(A) == 3
        assert store.put(B) == 3
        assert store.fetch(B) == 3
        with store.backend.rows.connection() as connection:
            left = connection.execute("SELECT count(*) FROM pg_temp.prefixstore_rows").fetchone()
        assert left == (0,)


def test_functions_in_our_schema_are_not_called(new_database):
    """Those of the server come first; one in our schema would win where its arguments fit better."""
    url = new_database()
    with store_of(open_pages(url, max_bytes=64 * MIB)) as store:
        store.put(A)
    names = {
        "pg_total_relation_size(text)": "bigint",
        "pg_logical_emit_message(boolean, text, text)": "text",
        "pg_advisory_xact_lock(integer)": "void",
        "octet_length(bytea)": "integer",
        "sum(bigint)": "bigint",
        "unnest(bytea[])": "SETOF bytea",
        "unnest(bigint[])": "SETOF bigint",
        "unnest(boolean[])": "SETOF boolean",
        "set_config(text, text, boolean)": "text",
        "current_schemas(boolean)": "name[]",
        "format_type(oid, integer)": "text",
    }
    for name, kind in names.items():
        as_administrator(
            url,
            f"CREATE FUNCTION public.{name} RETURNS {kind} LANGUAGE plpgsql "
            "AS $$ BEGIN RAISE 'a function of another ran'; END $$",
        )
    with closing(Store(open_pages(url, max_bytes=64 * MIB))) as store:
        assert store.fetch(A) == 3
        assert store.put(B) == 3
        store.engine.flush()
        assert store.backend.rows.disk_bytes() > 0
        assert len(store.engine.evictor.evict(0).pages) == 6
    migrations.upgrade(url)


def test_all_tables_are_those_of_the_first_schema(new_database):
    url = new_database(empty=True)
    as_administrator(url, "CREATE SCHEMA theirs", "CREATE SCHEMA ours")
    migrations.upgrade(url + "&options=-csearch_path%3Dours")
    with closing(Store(open_pages(f"{url}&options=-csearch_path%3Dnone,ours,theirs", max_bytes=MIB))) as store:
        store.put(A)
        as_administrator(url, "CREATE TABLE theirs.prefixstore_rows AS SELECT * FROM ours.prefixstore_rows")
        assert store.fetch(A) == 3
    assert refusal(f"{url}&options=-csearch_path%3Dtheirs,ours").startswith(("IncompatibleError", "LocationError"))


def test_the_roles_that_the_documents_tell_to_make_are_enough(new_database):
    url = make_url(new_database(empty=True))
    text = (ROOT / "docs" / "security.md").read_text().split("\n## PostgreSQL\n")[1].split("\n## ")[0]
    statements = "\n".join(line for line in text.splitlines() if line.startswith("    ") and "--" not in line)
    for name in ("kv_owner", "kv_server"):
        statements = statements.replace(name, f"pfxs_{name}")
    grants = [one.strip() for one in statements.split(";") if one.strip()]
    assert len(grants) == 7
    url = url.render_as_string(hide_password=False)
    database = make_url(url).database
    as_administrator(url, *grants[:2])
    try:
        as_administrator(url, f"ALTER DATABASE {database} OWNER TO pfxs_kv_owner")
        as_administrator(url, *(one.replace("DATABASE kv ", f"DATABASE {database} ") for one in grants[3:5]))
        owner, server = (
            make_url(url).set(username=f"pfxs_{name}").render_as_string(hide_password=False)
            for name in ("kv_owner", "kv_server")
        )
        migrations.upgrade(owner)
        as_administrator(owner, *grants[5:])
        with store_of(open_pages(server, max_bytes=64 * MIB)) as store:
            assert store.put(A) == 3
            assert store.fetch(A) == 3
            store.engine.flush()
            store.engine.evictor.evict(0)
            assert store.put(A) == 3
        with store_of(open_pages(owner, max_bytes=64 * MIB)) as store:
            store.engine.upkeep.clear(None)
            store.engine.upkeep.scrub()
    finally:
        as_administrator(url, f"ALTER DATABASE {database} OWNER TO postgres")
        as_administrator(url, "DROP OWNED BY pfxs_kv_owner, pfxs_kv_server CASCADE")
        as_administrator(url, "DROP ROLE pfxs_kv_owner, pfxs_kv_server")
