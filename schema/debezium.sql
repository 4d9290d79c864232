-- The way from Debezium's outbox event router: a trigger that emits what is inserted into its outbox table.
-- Not a migration: `outbox-relay migrate --debezium` runs it, and may run it again at any time.

-- The two functions that the trigger calls for each row are called under its search_path. One of their own would cost
-- as much as the rest of an emit, and no other role may call them.

-- A text as Connect's JsonConverter writes it: \u001F where PostgreSQL writes \u001f, and characters above U+FFFF as
-- two escapes. Of all others both escape the same ones in the same way.
create or replace function outbox_internal.debezium_json(value text) returns text
language plpgsql immutable strict
as $$
declare
    odd constant text := '[\x0b\x0e\x0f\x1a-\x1f\U00010000-\U0010ffff]';
begin
    if value collate "C" !~ odd then
        return to_json(value)::text;
    end if;
    return '"' || (
        select string_agg(
                   case when c.code >= 65536
                        then '\u' || upper(to_hex(55296 + ((c.code - 65536) >> 10)))
                             || '\u' || upper(to_hex(56320 + ((c.code - 65536) & 1023)))
                        when p.piece collate "C" ~ odd then '\u00' || upper(lpad(to_hex(c.code), 2, '0'))
                        else substr(to_json(p.piece)::text, 2, length(to_json(p.piece)::text) - 2) end,
                   '' order by p.place)
          from (select m.piece[1], m.place
                  from regexp_matches(value collate "C", odd || '|' || replace(odd, '[', '[^') || '+', 'g')
                       with ordinality m (piece, place)) p
         cross join lateral (select case when length(p.piece) = 1 then ascii(p.piece) else 0 end as code) c
    ) || '"';
end
$$;

-- The type of an event: the row's, with "_" for what a type cannot have; the aggregate's type where the row has none.
-- Nothing here may refuse a row that Debezium takes.
create or replace function outbox_internal.debezium_type(row_type text, route text) returns text
language plpgsql immutable
as $$
declare
    -- Types that begin with "outbox." are the relay's own.
    found constant text := regexp_replace(
        left(coalesce(nullif(row_type, ''), nullif(route, ''), '_'), 255), '^outbox\.', 'outbox_');
begin
    if found collate "C" !~ '[^\x21-\x29\x2b-\x7e]' then
        return found;
    end if;
    return regexp_replace(found collate "C", '[^\x21-\x29\x2b-\x7e]', '_', 'g');
end
$$;

-- The settings of the event router in a connector's configuration, without the prefix transforms.NAME. Raises an error
-- for what would make other records than the trigger can.
create or replace function outbox_internal.debezium_router(config jsonb) returns jsonb
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
    router_class constant text := 'io.debezium.transforms.outbox.EventRouter';
    router jsonb := '{}';
    part record;
    fault text;
begin
    for part in
        select c.key as setting, t.name[1] as name, t.name[2] as option, c.value,
               config ->> ('transforms.' || t.name[1] || '.type') as class
          from jsonb_each_text(config) c
         cross join lateral regexp_match(c.key, '^transforms\.([^.]+)\.(.+)$') t (name)
         where t.name is not null
    loop
        fault := case
            when part.class <> router_class
            then format('transforms.%s is another transformation than %s', part.name, router_class)
            when part.option in ('type', 'predicate', 'negate', 'table.field.event.id', 'table.field.event.key',
                                 'table.field.event.payload', 'table.field.event.schema.version',
                                 'table.fields.additional.placement', 'table.expand.json.payload', 'route.by.field',
                                 'route.topic.replacement', 'route.tombstone.on.empty.payload')
                 or part.option = 'route.topic.regex' and part.value = '(?<routedByValue>.*)'
                 or part.option = 'table.op.invalid.behavior' and part.value in ('warn', 'error', 'fatal')
            then null
            else format('%s = %s cannot be done', part.setting, part.value)
        end;
        exit when fault is not null;
        router := router || jsonb_build_object(part.option, part.value);
    end loop;
    if fault is null and replace(router ->> 'route.topic.replacement', '${routedByValue}', '') ~ '[^a-zA-Z0-9._-]' then
        fault := 'route.topic.replacement may have ${routedByValue} and else only what stands in a topic''s name';
    elsif fault is null and config ->> 'header.converter' not in (
        'org.apache.kafka.connect.storage.SimpleHeaderConverter', 'org.apache.kafka.connect.storage.StringConverter'
    ) then
        fault := format('header.converter = %s cannot be done', config ->> 'header.converter');
    elsif fault is null and config ->> 'binary.handling.mode' <> 'bytes' then
        fault := format('binary.handling.mode = %s cannot be done', config ->> 'binary.handling.mode');
    end if;
    if fault is not null then
        raise exception using errcode = 'feature_not_supported', message = 'outbox.adopt_debezium: ' || fault,
            hint = 'Leave the setting out to accept records that differ in what it does.';
    end if;
    return router;
end
$$;

-- The format that a converter ('key' or 'value') of the configuration writes: 'string', 'binary', 'json', or null where
-- none is named. Raises an error for one that writes what the trigger cannot.
create or replace function outbox_internal.debezium_converter(config jsonb, part text) returns text
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
    class constant text := config ->> (part || '.converter');
    form constant text := case class
        when 'org.apache.kafka.connect.storage.StringConverter' then 'string'
        when 'org.apache.kafka.connect.json.JsonConverter' then 'json'
        when 'io.debezium.converters.BinaryDataConverter' then 'binary'
        when 'org.apache.kafka.connect.converters.ByteArrayConverter' then 'binary'
    end;
begin
    if class is not null and (form is null or part = 'key' and form = 'binary') then
        raise exception using errcode = 'feature_not_supported',
            message = format('outbox.adopt_debezium: %s.converter = %s cannot be done', part, class),
            hint = 'Records can be made by StringConverter, by JsonConverter without schemas and, where the payload '
                   'is bytea, by BinaryDataConverter or ByteArrayConverter.';
    elsif form = 'json' and coalesce((config ->> (part || '.converter.schemas.enable'))::boolean, true) then
        raise exception using errcode = 'feature_not_supported',
            message = format('outbox.adopt_debezium: JsonConverter writes a schema into each %s unless '
                             '%s.converter.schemas.enable = false', part, part),
            hint = 'Add that setting if the worker has it; records with schemas cannot be done.';
    end if;
    return form;
end
$$;

-- A column of an outbox table as the trigger reads it: an expression of a text, one of its value in JSON, and what that is there:
-- 'bare', 'quoted' or, for bytea, 'binary'. Every value is read through the output function of its type, by format():
-- a cast might run code of the table's owner with the rights of the log's owner. Raises an error for a column that is
-- missing or of a type that Debezium writes in a form of its own.
create or replace function outbox_internal.debezium_column(
    outbox_table regclass, name text, out expression text, out as_json text, out form text, out base regtype
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    category "char";
    kind "char";
begin
    select t.oid, t.typcategory, t.typtype into base, category, kind
      from pg_attribute a
      join pg_type d on d.oid = a.atttypid
      join pg_type t on t.oid = case when d.typtype = 'd' then d.typbasetype else d.oid end
     where a.attrelid = outbox_table and a.attname = name and a.attnum > 0 and not a.attisdropped;
    if not found then
        raise exception using errcode = 'undefined_column',
            message = format('outbox.adopt_debezium: table %s has no column %s', outbox_table, quote_ident(name)),
            hint = 'Columns are named as the connector names them: table.field.event.id, table.field.event.key, '
                   'table.field.event.payload, route.by.field, table.fields.additional.placement.';
    end if;
    form := case when base in ('int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'bool'::regtype) then 'bare'
                 when base = 'bytea'::regtype then 'binary'
                 when category = 'S' or kind = 'e'
                      or base in ('uuid'::regtype, 'json'::regtype, 'jsonb'::regtype) then 'quoted' end;
    if form is null then
        raise exception using errcode = 'feature_not_supported',
            message = format('outbox.adopt_debezium: column %s of table %s has type %s, which Debezium writes in a '
                             'form of its own', quote_ident(name), outbox_table, base),
            hint = 'Columns of text, uuid, integers, boolean, enums and JSON can be done: leave this one out.';
    end if;
    expression := format(
        case when base = 'bool'::regtype
             then 'case format(''%%s'', new.%1$I) when ''t'' then ''true'' when ''f'' then ''false'' end'
             else 'case when new.%1$I is not null then format(''%%s'', new.%1$I) end' end, name);
    as_json := case form
        when 'bare' then expression
        when 'quoted' then format('outbox_internal.debezium_json(%s)', expression)
        else format('''"'' || translate(encode((%s)::bytea, ''base64''), E''\n'', '''') || ''"''', expression) end;
end
$$;

-- The columns of table.fields.additional.placement, COLUMN:PLACEMENT[:ALIAS] separated by commas, as expressions:
-- `headers` continues the arguments of jsonb_build_object, `envelope` the text of a JSON object. `type_column` and
-- `content_type` are those that become headers which the record has anyway. `partitioned`: one becomes the header
-- `partition`, from which the sink takes the record's partition.
create or replace function outbox_internal.debezium_placed(
    outbox_table regclass, router jsonb, id_column text, route_column text,
    out headers text, out envelope text, out type_column text, out content_type text, out partitioned boolean
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    names text[] := '{id, aggregatetype}';
    entry text[];
    alias text;
    value text;
    fault text;
begin
    headers := '';
    envelope := '';
    partitioned := false;
    for entry in
        select string_to_array(trim(p), ':')
          from regexp_split_to_table(router ->> 'table.fields.additional.placement', ',') p where trim(p) <> ''
    loop
        alias := coalesce(entry[3], entry[1]);
        value := (outbox_internal.debezium_column(outbox_table, entry[1])).expression;
        if entry[2] = 'envelope' and array_length(entry, 1) <= 3 then
            envelope := envelope || format(' || %L || coalesce(%s, ''null'')',
                                           ',' || outbox_internal.debezium_json(alias) || ':',
                                           (outbox_internal.debezium_column(outbox_table, entry[1])).as_json);
            continue;
        end if;
        if entry[2] = 'partition' then
            alias := 'partition';
            partitioned := true;
        end if;
        continue when alias = 'id' and entry[1] = id_column or alias = 'aggregatetype' and entry[1] = route_column;
        fault := case
            when coalesce(entry[2] not in ('header', 'partition'), true) or array_length(entry, 1) > 3
            then 'cannot be done: it is not COLUMN:header, COLUMN:envelope or COLUMN:partition, with an alias or none'
            when alias = any (names) then 'the record has a header of this name already'
            else outbox_internal.header_fault(jsonb_build_object(alias, ''))
        end;
        if fault is not null then
            raise exception using errcode = 'feature_not_supported',
                message = format('outbox.adopt_debezium: table.fields.additional.placement: %s: %s',
                                 array_to_string(entry, ':'), fault);
        end if;
        names := names || alias;
        if alias = 'content-type' then
            content_type := value;
        elsif alias = 'type' then
            -- The record's header `type` is the event's type, unless the sink takes it from the event's own header.
            type_column := entry[1];
            headers := headers || format(', ''type'', nullif(%s, event_type)', value);
        else
            headers := headers || format(', %L, %s', alias, value);
        end if;
    end loop;
end
$$;

-- The payload of an event, as an expression of bytea, and its content type.
create or replace function outbox_internal.debezium_payload(
    outbox_table regclass, router jsonb, converter text, envelope text, out payload text, out content_type text
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    payload_column constant text := coalesce(router ->> 'table.field.event.payload', 'payload');
    expand constant boolean := coalesce((router ->> 'table.expand.json.payload')::boolean, false);
    as_json constant boolean := converter is not distinct from 'json';
    as_is text;
    is_binary boolean;
    base regtype;
begin
    select c.expression, c.form = 'binary', c.base into as_is, is_binary, base
      from outbox_internal.debezium_column(outbox_table, payload_column) c;
    if converter = 'string' and is_binary or converter = 'binary' and not is_binary
       or envelope <> '' and (not as_json or expand) or expand and (not as_json or is_binary) then
        raise exception using errcode = 'feature_not_supported',
            message = 'outbox.adopt_debezium: these settings do not go together, nor do they for Debezium',
            hint = format('value.converter writes %s and column %s has type %s; an envelope and '
                          'table.expand.json.payload need org.apache.kafka.connect.json.JsonConverter, and the latter '
                          'a text and no envelope.', coalesce(converter, 'string or binary'), payload_column, base);
    end if;
    content_type := case when as_json or base in ('json'::regtype, 'jsonb'::regtype) then 'application/json'
                         when is_binary then 'application/octet-stream'
                         else 'text/plain; charset=utf-8' end;
    payload := case
        when expand then format('case when %1$s ~ ''^[{\[]'' then %1$s else %2$s end', as_is,
                                (outbox_internal.debezium_column(outbox_table, payload_column)).as_json)
        when as_json then (outbox_internal.debezium_column(outbox_table, payload_column)).as_json
        else as_is end;
    if as_json then
        payload := format('coalesce(%s, ''null'')', payload);
    end if;
    if envelope <> '' then
        payload := format('''{"payload":'' || %s%s || ''}''', payload, envelope);
    end if;
    payload := format(case when is_binary and not as_json then '(%s)::bytea' else 'convert_to(%s, ''UTF8'')' end,
                      payload);
    if (router ->> 'route.tombstone.on.empty.payload')::boolean then
        payload := format('case when %s then %s end',
                          format(case when is_binary then '%s is not null'
                                      else '%s collate "C" !~ ''^[\x01-\x20]*$''' end, as_is), payload);
    end if;
end
$$;

-- Adopts a Debezium outbox table: what is inserted from the commit of this transaction on is emitted in the inserting
-- transaction, as the connector of this configuration would write it. `connector` takes the answer of Kafka Connect's
-- GET /connectors/NAME or /connectors/NAME/config, or what of it differs from the defaults; read are the event
-- router's options and the converters. What cannot be done the same way is refused. Returns the lines that the relay's
-- Kafka sink needs in its table of the file: a payload is empty where the connector would write no value.
--
-- To be called by the owner of schema outbox, who needs the right TRIGGER on the table; it waits for transactions that
-- are inserting. An inserting role needs no new right. Called again, it replaces the trigger.
create or replace function outbox.adopt_debezium(outbox_table regclass, connector jsonb default '{}') returns text
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    config constant jsonb := case when jsonb_typeof(connector -> 'config') = 'object' then connector -> 'config'
                                  else connector end;
    router constant jsonb := outbox_internal.debezium_router(config);
    id_column constant text := coalesce(router ->> 'table.field.event.id', 'id');
    key_column constant text := coalesce(router ->> 'table.field.event.key', 'aggregateid');
    route_column constant text := coalesce(router ->> 'route.by.field', 'aggregatetype');
    new_name constant text := 'debezium_' || outbox_table::oid;
    old regprocedure;
    id record;
    key text;
    route text;
    row_type text;
    placed record;
    value record;
begin
    id := outbox_internal.debezium_column(outbox_table, id_column);
    if id.base <> 'uuid'::regtype and (select t.typcategory from pg_type t where t.oid = id.base) <> 'S' then
        raise exception using errcode = 'datatype_mismatch',
            message = format('outbox.adopt_debezium: column %s of table %s has type %s and holds no UUIDs',
                             quote_ident(id_column), outbox_table, id.base),
            hint = 'It becomes the uid, by which a consumer knows the event again.';
    end if;
    key := case when outbox_internal.debezium_converter(config, 'key') = 'json'
                then format('coalesce(%s, ''null'')', (outbox_internal.debezium_column(outbox_table, key_column)).as_json)
                else (outbox_internal.debezium_column(outbox_table, key_column)).expression end;
    route := (outbox_internal.debezium_column(outbox_table, route_column)).expression;
    placed := outbox_internal.debezium_placed(outbox_table, router, id_column, route_column);
    value := outbox_internal.debezium_payload(outbox_table, router, outbox_internal.debezium_converter(config, 'value'), placed.envelope);
    row_type := (
        select (outbox_internal.debezium_column(outbox_table, a.attname)).expression from pg_attribute a
         where a.attrelid = outbox_table and a.attname = coalesce(placed.type_column, 'type') and not a.attisdropped
    );

    old := (select p.oid from pg_trigger t join pg_proc p on p.oid = t.tgfoid
             where t.tgrelid = outbox_table and t.tgname = 'outbox_relay' and p.pronamespace = 'outbox_internal'::regnamespace);
    if old is not null then
        execute format('drop trigger outbox_relay on %s', outbox_table);
        execute format('drop function %s', old);
    end if;
    execute format('drop function if exists outbox_internal.%I()', new_name);
    execute format($create$
        create function outbox_internal.%I() returns trigger
        language plpgsql volatile security definer
        set search_path = pg_catalog, pg_temp
        as $trigger$
        declare
            event_type constant text := outbox_internal.debezium_type(%s, %s);
        begin
            if tg_op = 'UPDATE' then
                raise %s using errcode = 'triggered_action_exception',
                    message = format('an UPDATE of %%s is no event: nothing is emitted', tg_relid::regclass),
                    hint = 'Insert a row for each event.';
                return null;
            end if;
            perform outbox.emit_raw(
                type => event_type,
                payload => coalesce(%s, ''),
                key => %s,
                headers => jsonb_strip_nulls(jsonb_build_object('aggregatetype', %s%s)),
                uid => (%s)::uuid,
                content_type => coalesce(%s, %L)
            );
            return null;
        end
        $trigger$
        $create$,
        new_name, coalesce(row_type, 'null'), route,
        case when router ->> 'table.op.invalid.behavior' = 'fatal' then 'exception' else 'warning' end,
        value.payload, key, route, placed.headers, id.expression,
        coalesce(placed.content_type, 'null'), value.content_type);
    execute format('comment on function outbox_internal.%I() is %L', new_name, 'Emits what is inserted into ' || outbox_table);
    execute format('revoke all on function outbox_internal.%I() from public', new_name);
    execute format('alter function outbox_internal.%I() owner to %s', new_name,
                   (select n.nspowner::regrole from pg_namespace n where n.nspname = 'outbox'));
    execute format('create trigger outbox_relay after insert or update on %s for each row execute function outbox_internal.%I()',
                   outbox_table, new_name);
    return format(E'topic = "%s"\ntombstones = true',
                  replace(coalesce(router ->> 'route.topic.replacement', 'outbox.event.${routedByValue}'),
                          '${routedByValue}', '{headers.aggregatetype}'))
           || case when placed.partitioned then E'\npartition_header = "partition"' else '' end
           || case when placed.type_column is not null then E'\ntype_header = "type"' else '' end;
end
$$;
comment on function outbox.adopt_debezium is
    'Create a trigger that emits what is inserted into an outbox table of Debezium''s, and return what it does. `connector` '
    'has the properties of the connector that it replaces.';
