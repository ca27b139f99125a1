"""What Alembic runs: it prints the statements of the migrations, for ``prefixstore.backends.sql.migrations``."""

from __future__ import annotations

from alembic import context

from prefixstore.backends.sql.migrations import VERSION_TABLE

context.configure(
    dialect_name=context.config.attributes["dialect"],
    version_table=VERSION_TABLE,
    literal_binds=True,
    output_buffer=context.config.output_buffer,
    # the caller, who runs the statements, begins and ends the transaction
    transactional_ddl=False,
)
context.run_migrations()
