/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The bytes of the file tier's sectors and records. All checksums are keyed with the file's secret,
 * so that no payload, which clients write, can pass for a record.
 */

#include "store/file/record.h"

#include <string.h>

#include "ipc/base/wide.h"

static struct kvd_key hash(const uint8_t *secret, const void *data, size_t bytes) {
        return kvd_wide_best()->hash(data, bytes, secret);
}

void file_key_of_life(const uint8_t *secret, uint64_t life, uint8_t *ret) {
        for (uint32_t i = 0; i < KVD_SECRET_BYTES; i++)
                ret[i] = secret[i] ^ (uint8_t)(life >> i % sizeof life * 8);
}

/* ---- sectors --------------------------------------------------------------------------------- */

static struct kvd_key sector_checksum(const uint8_t *secret, const struct file_mark *sector) {
        struct file_mark blank = *sector;
        struct {
                struct file_mark mark;
                struct kvd_key rest;
        } in;

        blank.checksum = (struct kvd_key){0};
        in.mark = blank;
        in.rest = hash(secret, sector + 1, DISK_SECTOR - sizeof *sector);
        return hash(secret, &in, sizeof in);
}

void file_sector_seal(const uint8_t *secret, enum file_sector what, struct file_mark *sector) {
        sector->magic = FILE_MAGIC;
        sector->version = FILE_VERSION;
        sector->what = what;
        sector->checksum = sector_checksum(secret, sector);
}

bool file_sector_whole(const uint8_t *secret, enum file_sector what,
                       const struct file_mark *sector) {
        return sector->magic == FILE_MAGIC && sector->version == FILE_VERSION &&
               sector->what == what &&
               kvd_key_equal(sector->checksum, sector_checksum(secret, sector));
}

bool file_super_makes_sense(const struct file_super *s) {
        return file_sector_whole(s->secret, FILE_SUPER, &s->mark) &&
               s->n_namespaces <= FILE_NAMESPACES && s->extent_bytes > DISK_SECTOR &&
               s->extent_bytes % DISK_SECTOR == 0 && s->bytes > FILE_HEAD &&
               s->extent_bytes <= s->bytes - FILE_HEAD;
}

/* ---- records --------------------------------------------------------------------------------- */

uint64_t file_tag(const uint8_t *secret, const struct kvd_label *label, const uint32_t *tokens) {
        struct {
                uint64_t parent, epoch, root;
                uint32_t group, n_tokens;
                uint32_t tokens[KVD_MAX_BLOCK_TOKENS];
        } in;

        in.parent = label->parent;
        in.epoch = label->epoch;
        in.root = label->root;
        in.group = label->group;
        in.n_tokens = label->n_tokens;
        memcpy(in.tokens, tokens, label->n_tokens * sizeof *tokens);
        return hash(secret, &in, offsetof(typeof(in), tokens) + label->n_tokens * sizeof *tokens)
                .lo;
}

struct kvd_record_key file_key(const uint8_t *secret, const struct kvd_label *label,
                               const uint32_t *tokens) {
        return (struct kvd_record_key){.tag = file_tag(secret, label, tokens),
                                       .hint = kvd_hint(file_handle(label->parent), label->group,
                                                        label->root, tokens, label->n_tokens)};
}

static const void *payload_of(const struct file_record *record, uint32_t n_tokens) {
        return (const uint8_t *)record + file_head_bytes(n_tokens);
}

static const uint32_t *tokens_of(const struct file_record *record, uint32_t n_tokens) {
        return file_record_has_tokens(n_tokens) ? record->tokens : (const uint32_t *)(record + 1);
}

/* Covers the record's label and tokens, and its place, too. */
static struct kvd_key payload_checksum(const uint8_t *secret, const struct file_contents *of,
                                       const void *payload) {
        struct {
                struct kvd_label label;
                uint64_t place, bytes;
                struct kvd_key tokens, payload;
        } in = {.place = of->place, .bytes = of->bytes};

        in.label = *of->label;
        in.tokens = hash(secret, of->tokens, of->label->n_tokens * sizeof *of->tokens);
        in.payload = hash(secret, payload, of->bytes);
        return hash(secret, &in, sizeof in);
}

/* Bytes that are not used are zero. */
static void write_tokens(const struct file_contents *of, struct file_record *ret) {
        uint32_t n = of->label->n_tokens;

        if (!file_record_has_tokens(n))
                memset(ret + 1, 0, file_head_bytes(n) - sizeof *ret);
        memcpy((uint32_t *)tokens_of(ret, n), of->tokens, n * sizeof *of->tokens);
}

void file_record_make(const uint8_t *secret, const uint8_t *file_secret,
                      const struct file_contents *of, struct file_record *ret) {
        uint32_t n = of->label->n_tokens;

        *ret = (struct file_record){.place = of->place,
                                    .label = *of->label,
                                    .payload_bytes = of->bytes};
        if (!file_record_has_tokens(n))
                ret->key = file_key(file_secret, of->label, of->tokens);
        write_tokens(of, ret);
        ret->payload = payload_checksum(secret, of, payload_of(ret, n));
        file_sector_seal(secret, FILE_RECORD, &ret->mark);
}

bool file_record_lies_right(const uint8_t *secret, const struct file_record *record,
                            uint64_t place) {
        return file_sector_whole(secret, FILE_RECORD, &record->mark) && record->place == place &&
               record->label.n_tokens <= KVD_MAX_BLOCK_TOKENS;
}

struct kvd_record_key file_record_key(const uint8_t *file_secret,
                                      const struct file_record *record) {
        return file_record_has_tokens(record->label.n_tokens) ?
                       file_key(file_secret, &record->label, record->tokens) :
                       record->key;
}

static bool same_label(const struct file_record *record, const struct file_contents *of) {
        const struct kvd_label *label = of->label;
        const uint32_t *tokens = tokens_of(record, label->n_tokens);

        return memcmp(&record->label, label, sizeof *label) == 0 &&
               memcmp(tokens, of->tokens, label->n_tokens * sizeof *tokens) == 0;
}

static bool same_payload(const uint8_t *secret, const struct file_record *record,
                         const struct file_contents *of) {
        struct kvd_key right = payload_checksum(secret, of,
                                                payload_of(record, of->label->n_tokens));

        return kvd_key_equal(record->payload, right);
}

bool file_record_is(const uint8_t *secret, const struct file_record *record,
                    const struct file_contents *of) {
        return file_record_lies_right(secret, record, of->place) && same_label(record, of) &&
               record->payload_bytes == of->bytes && same_payload(secret, record, of);
}
