/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Writes seeds for the fuzz targets: three of every message, known bombs, configurations, settings,
 * a dictionary.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "daemon/base/config.h"
#include "ipc/base/settings.h"
#include "ipc/base/util.h"
#include "ipc/frame.h"
#include "tests/ipc/sample.h"

static FILE *create(const char *folder, const char *sub, const char *name) {
        char path[4096];
        FILE *f;

        snprintf(path, sizeof path, "%s/%s", folder, sub);
        mkdir(path, 0777);
        snprintf(path, sizeof path, "%s/%s/%s", folder, sub, name);
        f = fopen(path, "we");
        if (!f) {
                perror(path);
                exit(1);
        }
        return f;
}

static void write_seed(const char *folder, const char *sub, const char *name, const void *data,
                       size_t size) {
        FILE *f = create(folder, sub, name);

        fwrite(data, 1, size, f);
        fclose(f);
}

static void write_messages(const char *folder, uint32_t number) {
        static const char *const kinds[] = {"empty", "largest", "random"}; /* enum sample_kind */
        static uint8_t frame[KVD_FRAME_MAX];
        uint64_t seed = number;
        struct kvd_msg msg;
        char name[64];
        ssize_t n;

        for (enum sample_kind kind = SAMPLE_EMPTY; kind <= SAMPLE_RANDOM; kind++) {
                sample_fill(&msg, number, kind, &seed);
                n = kvd_msg_encode(&msg, frame, sizeof frame);
                if (n < 0) /* the largest seal exceeds a frame */
                        continue;
                snprintf(name, sizeof name, "%s-%s", kvd_msg_info(number)->name, kinds[kind]);
                write_seed(folder, "message", name, frame, (size_t)n);
        }
}

static void write_bombs(const char *folder) {
        static const char *const bombs[] = {"\xdd\x1f\0\0\0", "\xdf\x1f\0\0\0",
                                            "\xc6\xff\xff\xff\xff", "\xdb\xff\xff\xff\xff"};
        char name[16];

        for (size_t i = 0; i < ARRAY_SIZE(bombs); i++) {
                snprintf(name, sizeof name, "bomb-%zu", i);
                write_seed(folder, "message", name, bombs[i], 5);
        }
}

static void write_configs(const char *folder) {
        static const char domains[] =
                "[daemon]\npool = 1G\nadmins = 1, 2\n[domain a]\nusers = 5\nquota = 512M\n"
                "[domain b]\ngroups = 0\nisolation = arena\n";
        FILE *f = create(folder, "config", "default");

        config_print(f);
        fclose(f);
        write_seed(folder, "config", "domains", domains, sizeof domains - 1);
}

static void write_setting(const char *folder, const struct kvd_setting_info *info, double value,
                          const char *kind) {
        FILE *f;
        char name[96];

        snprintf(name, sizeof name, "%s.%s-%s", info->method, info->name, kind);
        f = create(folder, "setting", name);
        fprintf(f, "%s.%s=%g", info->method, info->name, value);
        fclose(f);
}

static void write_settings(const char *folder) {
        static const char *const odd[] = {"=nan", "=inf", "=0x1p1023", "=1e400",
                                          "=",    "=-0",  "=on off"};
        char name[32];

        for (int i = 0; i < KVD_N_SETTINGS; i++) {
                const struct kvd_setting_info *info = kvd_setting_info((enum kvd_setting)i);

                write_setting(folder, info, info->least, "least");
                write_setting(folder, info, info->most, "most");
        }
        for (size_t i = 0; i < ARRAY_SIZE(odd); i++) {
                snprintf(name, sizeof name, "odd-%zu", i);
                write_seed(folder, "setting", name, odd[i], strlen(odd[i]));
        }
}

static void write_dictionary(const char *folder) {
        FILE *f = create(folder, ".", "message.dict");

        for (uint32_t i = 1; i < 256; i++)
                if (kvd_msg_info(i))
                        for (const struct kvd_field *field = kvd_msg_info(i)->fields; field->name;
                             field++)
                                fprintf(f, "\"\\x%02x%s\"\n", 0xa0u | field->name_size,
                                        field->name);
        fclose(f);
}

int main(int argc, char **argv) {
        if (argc != 2) {
                fprintf(stderr, "usage: make-corpus FOLDER\n");
                return 1;
        }
        mkdir(argv[1], 0777);
        for (uint32_t i = 1; i < 256; i++)
                if (kvd_msg_info(i))
                        write_messages(argv[1], i);
        write_bombs(argv[1]);
        write_configs(argv[1]);
        write_settings(argv[1]);
        write_dictionary(argv[1]);
        return 0;
}
