/* SPDX-License-Identifier: Apache-2.0 */

/*
 * proto: the protocol, from the table that defines it. It needs no daemon.
 */

#include "tools/kvctl/kvctl.h"

static const struct column proto_columns[] = {
        {"number", "NUMBER", UNIT_NONE}, {"message", "MESSAGE", UNIT_NONE},
        {"field", "FIELD", UNIT_NONE},   {"type", "TYPE", UNIT_NONE},
        {"limit", "LIMIT", UNIT_COUNT},  {"meaning", "MEANING", UNIT_NONE},
};

/* None if the field takes every value of its type. */
static void fill_limit(struct table *t, const struct kvd_field *field) {
        if (field->limit == UINT64_MAX ||
            (field->type == KVD_FIELD_u32 && field->limit == UINT32_MAX))
                table_none(t);
        else
                table_number(t, field->limit);
}

/* A message is a row without field, type and limit; each of its fields is a row below it. */
static void fill_message(struct table *t, uint32_t number, const struct kvd_msg_info *info) {
        table_number(t, number);
        table_string(t, info->name);
        for (int i = 0; i < 3; i++)
                table_none(t);
        table_string(t, info->text);
        for (uint32_t i = 0; i < info->n_fields; i++) {
                const struct kvd_field *field = &info->fields[i];

                table_number(t, number);
                table_string(t, info->name);
                table_string(t, field->name);
                table_string(t, kvd_field_type_name(field->type));
                fill_limit(t, field);
                table_string(t, field->text);
        }
}

int verb_proto(struct kvctl *kvctl, struct answer *answer) {
        struct table *t = ANSWER_ROWS(answer, "protocol", proto_columns);

        if (!t)
                return kvctl_out_of_memory(kvctl);
        for (uint32_t number = 0; number < 256; number++) {
                const struct kvd_msg_info *info = kvd_msg_info(number);

                if (info)
                        fill_message(t, number, info);
        }
        return 0;
}
